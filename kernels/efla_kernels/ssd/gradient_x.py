"""State-space duality, parallel over chunks, their tiles of pairs and parts of a group's heads: the gradient of x.

With dS the gradient of the state after the chunk, everything transposed (rows j of x, columns i of dy, i >= j):

    u_j = sum_i Gamma_ij (C_i . B_j) dy_i + exp(b_L - b_j) dS^T B_j          dx_j = dt_j u_j + D dy_j
    z_ij = Gamma_ij (C_i . B_j) (dy_i . x_j)                                 M_ij = Gamma_ij dt_j (dy_i . x_j)

z leaves as its sums over i and (weighted by dt_j) over j, for the gates, beside exp(b_L - b_j) x_j . (dS^T B_j). M,
summed over the heads that share B and C, is what the gradients of B and C need of all pairs, so that those products
are taken once per group. The diagonal (a token that reads what it wrote itself) has no decay: it is taken apart, in
fp32, so that the decay's gradient never holds it. Where decays are strong it is nearly all that there is.

A chunk of two blocks has three programs: one per block of rows for dx and the triangle's z and M, and one for z and M
of the full tile. The first block forms that tile's Gamma once more, for u alone: with its z and M too it would need
twice the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.tiles import chunk_span, load_rows
from efla_kernels.ssd.tiles import (
    chunk_states,
    decays,
    head_tile,
    heads,
    heads_place,
    state_tile,
    store_head_tile,
)


@triton.jit
def gradient_rows(
    x,
    B,
    C,
    D,
    dy,
    table,
    d_states,
    dx,
    pair,
    z_own,
    z_columns,
    z_rows,
    writes,
    d_skip,
    m,
    first,
    left,
    block,
    first_head,
    heads_each,
    g,
    x_token,
    x_head,
    b_token,
    b_group,
    c_token,
    c_group,
    LATER: tl.constexpr,  # the chunk's first block of two: read by the second one too
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    SKIP: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of one block of a chunk's dx, and what its triangle of pairs gives to M, z and dD."""
    r0 = block * R
    own = first + r0
    rows = r0 + tl.arange(0, R)
    key = load_rows(B + own * b_token + g * b_group, b_token, left - r0, N, BN, 0, DTYPE, R)
    read = load_rows(C + own * c_token + g * c_group, c_token, left - r0, N, BN, 0, DTYPE, R)
    BC = tl.dot(key, tl.trans(read), input_precision=PRECISION)
    if LATER:
        later = load_rows(C + (own + R) * c_token + g * c_group, c_token, left - R, N, BN, 0, DTYPE, R)
        BC_later = tl.dot(key, tl.trans(later), input_precision=PRECISION)
    BC_own = tl.sum(tl.where(tl.arange(0, R)[:, None] == tl.arange(0, R)[None, :], BC, 0.0), 1)
    M = tl.zeros([R, R], tl.float32)
    M_own = tl.zeros([R], tl.float32)
    xs = heads(x + first * x_token, left, x_token, P, H, R, TMA)
    dys = heads(dy + first * H * P, left, H * P, P, H, R, TMA)
    dxs = heads(dx + first * H * P, left, H * P, P, H, R, TMA)
    dSs = chunk_states(d_states, m, H, N, P, BN, BP, TMA)
    for h in tl.range(first_head, first_head + heads_each, num_stages=STAGES):
        slot = m * H + h
        value = head_tile(xs, left, x_token, x_head, r0, h, P, BP, R, DTYPE, TMA)
        d_out = head_tile(dys, left, H * P, P, r0, h, P, BP, R, DTYPE, TMA)
        dS = state_tile(dSs, h, 0, N, P, BN, BP, DTYPE, TMA)
        at = table + slot * 2 * L
        dt = tl.load(at + rows)
        b = tl.load(at + L + rows)
        u = tl.dot(key, dS, input_precision=PRECISION) * tl.exp2(tl.load(at + 2 * L - 1) - b)[:, None]
        wide = value.to(tl.float32)
        tl.store(writes + slot * L + rows, tl.sum(u * wide, 1))
        if LATER:
            d_out_later = head_tile(dys, left, H * P, P, R, h, P, BP, R, DTYPE, TMA)
            weight = BC_later * decays(tl.load(at + L + R + rows), b, False, R)
            u += tl.dot(weight.to(DTYPE), d_out_later, input_precision=PRECISION)
        gamma = decays(b, b, True, R)
        u += tl.dot((BC * gamma).to(DTYPE), d_out, input_precision=PRECISION)
        wide_d = d_out.to(tl.float32)
        own_pairs = tl.sum(wide_d * wide, 1)
        tl.store(z_own + slot * L + rows, BC_own * own_pairs)
        M_own += own_pairs * dt
        factor = BC_own * dt
        if SKIP:
            factor += tl.load(D + h).to(tl.float32)
            tl.store(d_skip + slot * (L // R) + block, tl.sum(own_pairs, 0))
        store_head_tile(dxs, left, r0, h, u * dt[:, None] + wide_d * factor[:, None], H, P, BP, R, DTYPE, TMA)
        gamma *= tl.dot(value, tl.trans(d_out), input_precision=PRECISION)
        M += gamma * dt[:, None]
        gamma *= BC
        tl.store(z_columns + slot * L + rows, tl.sum(gamma, 1))
        tl.store(z_rows + slot * L + rows, tl.sum(gamma * dt[:, None], 0))
    M += tl.where(tl.arange(0, R)[:, None] == tl.arange(0, R)[None, :], M_own[:, None], 0.0)
    tl.store(pair + rows[:, None] * L + rows[None, :], M)


@triton.jit
def full_tile(
    x,
    B,
    C,
    dy,
    table,
    pair,
    z_full,
    m,
    first,
    left,
    first_head,
    heads_each,
    g,
    x_token,
    x_head,
    b_token,
    b_group,
    c_token,
    c_group,
    H: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    """M and z of the pairs that the second block of a chunk has with the first."""
    rows = tl.arange(0, R)
    key = load_rows(B + first * b_token + g * b_group, b_token, left, N, BN, 0, DTYPE, R)
    read = load_rows(C + (first + R) * c_token + g * c_group, c_token, left - R, N, BN, 0, DTYPE, R)
    BC = tl.dot(key, tl.trans(read), input_precision=PRECISION)
    M = tl.zeros([R, R], tl.float32)
    xs = heads(x + first * x_token, left, x_token, P, H, R, TMA)
    dys = heads(dy + first * H * P, left, H * P, P, H, R, TMA)
    for h in tl.range(first_head, first_head + heads_each, num_stages=STAGES):
        slot = m * H + h
        value = head_tile(xs, left, x_token, x_head, 0, h, P, BP, R, DTYPE, TMA)
        d_out = head_tile(dys, left, H * P, P, R, h, P, BP, R, DTYPE, TMA)
        at = table + slot * 2 * L + rows
        dt = tl.load(at)
        z = tl.dot(value, tl.trans(d_out), input_precision=PRECISION)
        z *= decays(tl.load(at + L + R), tl.load(at + L), False, R)
        M += z * dt[:, None]
        z *= BC
        tl.store(z_full + slot * L + rows, tl.sum(z, 1))
        tl.store(z_full + slot * L + R + rows, tl.sum(z * dt[:, None], 0))
    tl.store(pair + rows[:, None] * L + R + rows[None, :], M)


@triton.jit(do_not_specialize=["T", "heads_each"])
def ssd_gradient_x_kernel(
    x,  # [B, T, H, P]
    B,  # [B, T, G, N]
    C,  # [B, T, G, N]
    D,  # [H]; SKIP
    dy,  # [B, T, H, P]
    table,  # [chunks, H, 2, L]
    d_states,  # [chunks, H, N, P]
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    dx,  # out [B, T, H, P]
    pairs,  # out [chunks, parts, L, L] fp32: M transposed, summed over the part's heads; the empty tile stays as it was
    z_own,  # out [chunks, H, L]: z_jj
    z_columns,  # out [chunks, H, L]: sum_i z_ij over the triangles, without the diagonal
    z_rows,  # out [chunks, H, L]: sum_j z_ij dt_j over the triangles
    z_full,  # out [chunks, H, L]: both sums of the full tile, the first block's over i, the second block's over j
    writes,  # out [chunks, H, L]: exp(b_L - b_j) x_j . (dS^T B_j)
    d_skip,  # out [chunks, H, L / R]: sum of dy . x; SKIP
    T,
    heads_each,
    x_token,
    x_head,
    b_token,
    b_group,
    c_token,
    c_group,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    SKIP: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    PLACES: tl.constexpr = 3 if L > R else 1
    m, place, part, first_head, g = heads_place(heads_each, H, G, PLACES)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED, L)
    if used:
        pair = pairs + (m * (H // heads_each) + part) * L * L
        if place == PLACES - 1:  # the last block has none behind it
            gradient_rows(
                x, B, C, D, dy, table, d_states, dx, pair, z_own, z_columns, z_rows, writes, d_skip, m, first, left,
                L // R - 1, first_head, heads_each, g, x_token, x_head, b_token, b_group, c_token, c_group,
                False, H, N, P, BN, BP, L, R, SKIP, DTYPE, PRECISION, TMA, STAGES,
            )  # fmt: skip
        elif place == 0:
            gradient_rows(
                x, B, C, D, dy, table, d_states, dx, pair, z_own, z_columns, z_rows, writes, d_skip, m, first, left,
                0, first_head, heads_each, g, x_token, x_head, b_token, b_group, c_token, c_group,
                True, H, N, P, BN, BP, L, R, SKIP, DTYPE, PRECISION, TMA, STAGES,
            )  # fmt: skip
        else:
            full_tile(
                x, B, C, dy, table, pair, z_full, m, first, left, first_head, heads_each, g, x_token, x_head, b_token,
                b_group, c_token, c_group, H, N, P, BN, BP, L, R, DTYPE, PRECISION, TMA, STAGES,
            )  # fmt: skip
