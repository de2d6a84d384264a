"""State-space duality, parallel over chunks, blocks of their rows and groups: the gradients of B and C.

With S the state before the chunk, dS the gradient after it and M of `ssd_gradient_x_kernel`, sums over a group's heads:

    dC_i = sum_h exp(b_i) S dy_i + sum_j M_ij B_j          dB_j = sum_h exp(b_L - b_j) dt_j dS x_j + sum_i M_ij C_i

Both are one product over (heads x P); what a head adds to dC_i also gives, against C_i, the part of the decay's
gradient that comes from reading the state: exp(b_i) dy_i . (S^T C_i). A program has one of the two sides; neighbours
have the other, and find S and dS, of which <S, dS> needs both, in the L2 cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.tiles import chunk_span, load_rows, store_rows
from efla_kernels.ssd.tiles import chunk_states, head_tile, heads, heads_place, state_tile


@triton.jit
def one_side(
    values,  # dy (READS) or x
    state,  # S (READS) or dS
    other_state,  # dS (READS)
    own,  # C (READS) or B
    other,  # B (READS) or C
    table,
    pairs,  # [chunks, parts_of_pairs, L, L]
    reads,  # out [chunks, H, L]; READS
    kept,  # out [chunks, H, L / R]; READS
    out,  # [B, T, G, N] of this part
    m,
    block,
    first_head,
    g,
    first,
    left,
    heads_each,
    pair_parts,
    value_token,
    value_head,
    own_token,
    own_group,
    other_token,
    other_group,
    READS: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
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
    blocks: tl.constexpr = L // R
    SLICE: tl.constexpr = BN // blocks  # rows of the state whose part of <S, dS> this program sums
    r0 = block * R
    rows = r0 + tl.arange(0, R)
    if READS:
        mine = load_rows(own + (first + r0) * own_token + g * own_group, own_token, left - r0, N, BN, 0, tl.float32, R)
    acc = tl.zeros([R, BN], tl.float32)
    value_rows = heads(values + first * value_token, left, value_token, P, H, R, TMA)
    Ss = chunk_states(state, m, H, N, P, BN, BP, TMA)
    if READS:
        some_S = chunk_states(state, m, H, N, P, SLICE, BP, TMA)
        some_dS = chunk_states(other_state, m, H, N, P, SLICE, BP, TMA)
    for h in tl.range(first_head, first_head + heads_each, num_stages=STAGES):
        slot = m * H + h
        value = head_tile(value_rows, left, value_token, value_head, r0, h, P, BP, R, DTYPE, TMA)
        S = state_tile(Ss, h, 0, N, P, BN, BP, DTYPE, TMA)
        at = table + slot * 2 * L
        b = tl.load(at + L + rows)
        b_end = tl.load(at + 2 * L - 1)
        fresh = tl.dot(value, tl.trans(S), input_precision=PRECISION)
        if READS:
            fresh *= tl.exp2(b)[:, None]
            tl.store(reads + slot * L + rows, tl.sum(fresh * mine, 1))
            some = state_tile(some_S, h, block * SLICE, N, P, SLICE, BP, DTYPE, TMA).to(tl.float32)
            some *= state_tile(some_dS, h, block * SLICE, N, P, SLICE, BP, DTYPE, TMA).to(tl.float32)
            tl.store(kept + slot * blocks + block, tl.exp2(b_end) * tl.sum(tl.sum(some, 1), 0))
        else:
            fresh *= (tl.exp2(b_end - b) * tl.load(at + rows))[:, None]
        acc += fresh
    if first_head % (H // G) == 0:  # the group's first part adds the pairs of all its heads
        per_group = pair_parts // G
        base = pairs + (m * pair_parts + g * per_group) * L * L
        for tile in tl.static_range(blocks):
            needed = tile <= block if READS else tile >= block  # a row i has the pairs j <= i
            if needed:
                t0 = tile * R
                inner = tl.arange(0, R)
                M = tl.zeros([R, R], tl.float32)  # rows j, columns i
                for p in range(0, per_group):
                    if READS:
                        M += tl.load(base + p * L * L + (t0 + inner)[:, None] * L + rows[None, :])
                    else:
                        M += tl.load(base + p * L * L + rows[:, None] * L + (t0 + inner)[None, :])
                there = other + (first + t0) * other_token + g * other_group
                wide = load_rows(there, other_token, left - t0, N, BN, 0, DTYPE, R)
                if READS:
                    acc += tl.dot(tl.trans(M.to(DTYPE)), wide, input_precision=PRECISION)
                else:
                    acc += tl.dot(M.to(DTYPE), wide, input_precision=PRECISION)
    store_rows(out + ((first + r0) * G + g) * N, G * N, left - r0, N, BN, 0, acc, R)


@triton.jit(do_not_specialize=["T", "heads_each", "pair_parts", "part_size"])
def ssd_gradient_bc_kernel(
    x,
    B,
    C,
    dy,
    table,
    states,
    d_states,
    pairs,
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    dB,  # out [parts of a group's heads, B, T, G, N]
    dC,  # out, the same
    reads,  # out [chunks, H, L] fp32
    kept,  # out [chunks, H, L / R] fp32
    T,
    heads_each,
    pair_parts,
    part_size,
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
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    STAGES: tl.constexpr,
):
    m, place, _, first_head, g = heads_place(heads_each, H, G, 2 * (L // R))
    block = place // 2
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED, L)
    if used:
        shift = (first_head % (H // G) // heads_each).to(tl.int64) * part_size
        if place % 2 == 0:
            one_side(
                dy, states, d_states, C, B, table, pairs, reads, kept, dC + shift, m, block, first_head, g, first,
                left, heads_each, pair_parts, H * P, P, c_token, c_group, b_token, b_group,
                True, H, G, N, P, BN, BP, L, R, DTYPE, PRECISION, TMA, STAGES,
            )  # fmt: skip
        else:
            one_side(
                x, d_states, states, B, C, table, pairs, reads, kept, dB + shift, m, block, first_head, g, first,
                left, heads_each, pair_parts, x_token, x_head, b_token, b_group, c_token, c_group,
                False, H, G, N, P, BN, BP, L, R, DTYPE, PRECISION, TMA, STAGES,
            )  # fmt: skip
