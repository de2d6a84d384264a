"""State-space duality, parallel over chunks and parts of a group's heads: the outputs.

    Y = (Gamma * C B^T) (dt X) + exp(b) C S + D X          Gamma_ij = exp(b_i - b_j) for j <= i, else 0

C B^T belongs to a group: a program forms it once, and keeps it in registers for all its heads. A chunk of two blocks of
rows has both in one program, which then reads S and x once. With e the end of the first block, no decay of the second
block's rows needs an exponential per pair:

    Y_i = exp(b_i - b_e) [ sum_{j<=e} (C_i . B_j) exp(b_e - b_j) dt_j x_j + exp(b_e) C_i S ] + (the block's own pairs)

b never grows, so that all three factors are at most 1, and one that vanishes stands for a product that does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.tiles import chunk_span, load_rows
from efla_kernels.ssd.tiles import (
    chunk_states,
    chunk_table,
    head_tile,
    heads,
    heads_place,
    state_tile,
    store_head_tile,
    table_rows,
)


@triton.jit
def own_pairs(read, key, R: tl.constexpr, PRECISION: tl.constexpr):
    """C B^T of one block's rows, zeros above the diagonal."""
    CB = tl.dot(read, tl.trans(key), input_precision=PRECISION)
    return tl.where(tl.arange(0, R)[:, None] >= tl.arange(0, R)[None, :], CB, 0.0)


@triton.jit
def add_own(out, CB, b, dt, value, D, h, SKIP: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """out plus the skip and what a block's rows read of each other. Above the diagonal exp(-|..|) stays finite."""
    scores = CB * tl.exp2(-tl.abs(b[:, None] - b[None, :])) * dt[None, :]
    out += tl.dot(scores.to(DTYPE), value, input_precision=PRECISION)
    if SKIP:
        out += tl.load(D + h).to(tl.float32) * value.to(tl.float32)
    return out


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
    TWO: tl.constexpr = L > R
    m, _, _, first_head, g = heads_place(heads_each, H, G, 1)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED, L)
    if used:
        Bs = B + first * b_token + g * b_group
        Cs = C + first * c_token + g * c_group
        read = load_rows(Cs, c_token, left, N, BN, 0, DTYPE, R)
        key = load_rows(Bs, b_token, left, N, BN, 0, DTYPE, R)
        CB = own_pairs(read, key, R, PRECISION)
        if TWO:
            read_late = load_rows(Cs + R * c_token, c_token, left - R, N, BN, 0, DTYPE, R)
            CB_between = tl.dot(read_late, tl.trans(key), input_precision=PRECISION)
            key_late = load_rows(Bs + R * b_token, b_token, left - R, N, BN, 0, DTYPE, R)
            CB_late = own_pairs(read_late, key_late, R, PRECISION)
        xs = heads(x + first * x_token, left, x_token, P, H, R, TMA)
        ys = heads(y + first * H * P, left, H * P, P, H, R, TMA)
        Ss = chunk_states(states, m, H, N, P, BN, BP, TMA)
        ts = chunk_table(table, m, H, L, R, TMA)
        for h in tl.range(first_head, first_head + heads_each, num_stages=STAGES):
            S = state_tile(Ss, h, 0, N, P, BN, BP, DTYPE, TMA)
            value = head_tile(xs, left, x_token, x_head, 0, h, P, BP, R, DTYPE, TMA)
            dt = table_rows(ts, h, 0, 0, L, R, TMA)
            b = table_rows(ts, h, 1, 0, L, R, TMA)
            out = tl.dot(read, S, input_precision=PRECISION) * tl.exp2(b)[:, None]
            out = add_own(out, CB, b, dt, value, D, h, SKIP, DTYPE, PRECISION)
            store_head_tile(ys, left, 0, h, out, H, P, BP, R, DTYPE, TMA)
            if TWO:
                b_end = tl.load(table + (m * H + h) * 2 * L + L + R - 1)
                b_late = table_rows(ts, h, 1, R, L, R, TMA)
                out = tl.dot(read_late, S, input_precision=PRECISION) * tl.exp2(b_end)
                scores = CB_between * (tl.exp2(b_end - b) * dt)[None, :]
                out += tl.dot(scores.to(DTYPE), value, input_precision=PRECISION)
                out *= tl.exp2(b_late - b_end)[:, None]
                late = head_tile(xs, left, x_token, x_head, R, h, P, BP, R, DTYPE, TMA)
                dt_late = table_rows(ts, h, 0, R, L, R, TMA)
                out = add_own(out, CB_late, b_late, dt_late, late, D, h, SKIP, DTYPE, PRECISION)
                store_head_tile(ys, left, R, h, out, H, P, BP, R, DTYPE, TMA)
