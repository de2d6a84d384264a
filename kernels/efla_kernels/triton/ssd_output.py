"""State-space duality, parallel over chunks, blocks of their rows and parts of a group's heads: the outputs.

    Y = (Gamma * C B^T) (dt X) + exp(b) C S + D X          Gamma_ij = exp(b_i - b_j) for j <= i, else 0

C B^T belongs to a group: a program forms its rows of it once, and keeps them in registers for all its heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.triton.ssd_tiles import (
    chunk_states,
    decays,
    head_tile,
    heads,
    heads_place,
    state_tile,
    store_head_tile,
)
from efla_kernels.triton.tiles import chunk_span, load_rows


@triton.jit
def output_rows(
    x,
    B,
    C,
    D,
    table,
    states,
    y,
    m,
    first,
    left,
    r0,
    first_head,
    heads_each,
    g,
    x_token,
    x_head,
    b_token,
    b_group,
    c_token,
    c_group,
    SECOND: tl.constexpr,  # the chunk's second block of rows: reads the first one too
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
    """Rows r0 to r0 + R - 1 of a chunk's outputs, for the part's heads."""
    own = first + r0
    rows = tl.arange(0, R)
    read = load_rows(C + own * c_token + g * c_group, c_token, left - r0, N, BN, 0, DTYPE, R)
    key = load_rows(B + own * b_token + g * b_group, b_token, left - r0, N, BN, 0, DTYPE, R)
    CB = tl.dot(read, tl.trans(key), input_precision=PRECISION)
    if SECOND:
        before = load_rows(B + first * b_token + g * b_group, b_token, left, N, BN, 0, DTYPE, R)
        CB_before = tl.dot(read, tl.trans(before), input_precision=PRECISION)
    xs = heads(x + first * x_token, left, x_token, P, H, R, TMA)
    ys = heads(y + first * H * P, left, H * P, P, H, R, TMA)
    Ss = chunk_states(states, m, H, N, P, BN, BP, TMA)
    for h in tl.range(first_head, first_head + heads_each, num_stages=STAGES):
        value = head_tile(xs, left, x_token, x_head, r0, h, P, BP, R, DTYPE, TMA)
        S = state_tile(Ss, h, 0, N, P, BN, BP, DTYPE, TMA)
        at = table + (m * H + h) * 2 * L + rows
        b = tl.load(at + L + r0)
        out = tl.dot(read, S, input_precision=PRECISION) * tl.exp2(b)[:, None]
        scores = CB * decays(b, b, True, False, R) * tl.load(at + r0)[None, :]
        out += tl.dot(scores.to(DTYPE), value, input_precision=PRECISION)
        if SECOND:
            earlier = head_tile(xs, left, x_token, x_head, 0, h, P, BP, R, DTYPE, TMA)
            scores = CB_before * decays(b, tl.load(at + L), False, False, R) * tl.load(at)[None, :]
            out += tl.dot(scores.to(DTYPE), earlier, input_precision=PRECISION)
        if SKIP:
            out += tl.load(D + h).to(tl.float32) * value.to(tl.float32)
        store_head_tile(ys, left, r0, h, out, H, P, BP, R, DTYPE, TMA)


@triton.jit(do_not_specialize=["T", "heads_each"])
def ssd_output_kernel(
    x,  # [B, T, H, P]
    B,  # [B, T, G, N]
    C,  # [B, T, G, N]
    D,  # [H]; SKIP
    table,  # [chunks, H, 2, L]
    states,  # [chunks, H, N, P]
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    y,  # out [B, T, H, P]
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
    m, block, _, first_head, g = heads_place(heads_each, H, G, L // R)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED, L)
    inside = block * R < left
    if used & inside:
        if block == 0:
            output_rows(
                x, B, C, D, table, states, y, m, first, left, 0, first_head, heads_each, g, x_token, x_head, b_token,
                b_group, c_token, c_group, False, H, N, P, BN, BP, L, R, SKIP, DTYPE, PRECISION, TMA, STAGES,
            )  # fmt: skip
        else:
            output_rows(
                x, B, C, D, table, states, y, m, first, left, R, first_head, heads_each, g, x_token, x_head, b_token,
                b_group, c_token, c_group, True, H, N, P, BN, BP, L, R, SKIP, DTYPE, PRECISION, TMA, STAGES,
            )  # fmt: skip
