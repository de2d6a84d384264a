"""Kernel 3, serial over the chunks in reverse, parallel over heads and columns of v: gradients of the states.

With dS the gradient of the state after the chunk and the other symbols of the forward scan:

    dX = P^T dO + exp(b_C - b) K dS        dR = T^T dX        dV = w dR
    dS_before = exp(b_C) dS + (r exp(b) Q)^T dO - (e exp(b) K)^T dR

Saves dS (after each chunk) for the chunk-parallel gradients of q, k and the gates, and dR unless these take dV in its
place (`gradient_kernel`). Where they tell dL/d ln w from dL/d ln e, rowsum(dR * V) = (dL/d ln w) / w is taken here,
from dR in fp32: a token with a large w may be most of the gate's gradient with a sum far below |dR| |V|, which dR
rounded to bf16 would lose (README.md, Numerics).
For the same reason T^T multiplies dX rounded, and what the rounding left is added to the token's own row, where T is 1.
P is read where it was kept, else formed again from q and k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.delta_rule.gates import decay_pairs
from efla_kernels.launch.tiles import (
    CHUNK,
    load_state,
    load_tile,
    matrix,
    scan_place,
    sequence_span,
    store_state,
    store_tile,
)


@triton.jit(do_not_specialize=["chunks_per_segment"])
def scan_backward_kernel(
    q, k, v, do, inverse,
    scores,  # or unused
    table,
    d_final,  # [N, segments, H, K, V] fp32: gradient of the state at each segment's end, or unused
    cu_seqlens, first_chunk,
    dv,  # out [B, T, H, V]
    d_initial,  # out [N, H, K, V] fp32, or unused
    d_states,  # out [chunks, H, K, V]
    d_solved,  # out dR [chunks, H, C, V], or unused
    d_writes,  # out rowsum(dR * V) of every block of V [B, T, H, blocks] fp32, or unused
    T, chunks_per_segment, q_token, q_head, k_token, k_head, v_token, v_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SEGMENTS: tl.constexpr,
    DECAYS: tl.constexpr, D_FINAL: tl.constexpr, D_INITIAL: tl.constexpr,
    SCORES: tl.constexpr,  # P was kept
    BOUNDED: tl.constexpr,  # see `decay_pairs`
    STORE: tl.constexpr,  # False: only the state's gradient is wanted (first pass of a split sequence)
    SOLVED: tl.constexpr,  # dR is wanted
    WRITES: tl.constexpr,  # d_writes are wanted
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n, segment, h, column0 = scan_place(H, V, BV, SEGMENTS)
    first, length, chunk0 = sequence_span(n, T, cu_seqlens, first_chunk, PACKED)
    rows = tl.arange(0, CHUNK)
    COLUMNS: tl.constexpr = 5 if DECAYS else 4

    start = segment * chunks_per_segment
    chunks = tl.cdiv(length, CHUNK) - start
    if SEGMENTS > 1:
        chunks = tl.minimum(chunks, chunks_per_segment)
    dS = tl.zeros([BK, BV], tl.float32)
    if D_FINAL:
        dS = load_state(d_final + ((n * SEGMENTS + segment) * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0)
    slots = tl.cdiv(length, CHUNK) * H  # of this sequence, in the buffers of chunk data
    q_rows = matrix(q + first * q_token + h * q_head, length, q_token, K, BK, TMA)
    k_rows = matrix(k + first * k_token + h * k_head, length, k_token, K, BK, TMA)
    do_rows = matrix(do + (first * H + h) * V, length, H * V, V, BV, TMA)
    T_rows = matrix(inverse + chunk0 * H * CHUNK * CHUNK, slots * CHUNK, CHUNK, CHUNK, CHUNK, TMA)
    if SCORES:
        P_rows = matrix(scores + chunk0 * H * CHUNK * CHUNK, slots * CHUNK, CHUNK, CHUNK, CHUNK, TMA)
    if STORE:
        dv_rows = matrix(dv + (first * H + h) * V, length, H * V, V, BV, TMA)
        if WRITES:
            BLOCKS: tl.constexpr = (V + BV - 1) // BV
            own_writes = d_writes + (first * H + h) * BLOCKS + column0 // BV
            v_rows = matrix(v + first * v_token + h * v_head, length, v_token, V, BV, TMA)
        if SOLVED:
            dR_rows = matrix(d_solved + chunk0 * H * CHUNK * V, slots * CHUNK, V, V, BV, TMA)
        if TMA:
            dS_rows = tl.make_tensor_descriptor(d_states + chunk0 * H * K * V, [slots * K, V], [V, 1], [BK, BV])
    for step in tl.range(0, chunks, num_stages=STAGES):
        c = start + chunks - 1 - step
        slot = c * H + h
        query = load_tile(q_rows, length, q_token, c * CHUNK, 0, K, BK, TMA).to(DTYPE)
        key = load_tile(k_rows, length, k_token, c * CHUNK, 0, K, BK, TMA).to(DTYPE)
        d_out = load_tile(do_rows, length, H * V, c * CHUNK, column0, V, BV, TMA).to(DTYPE)
        Tm = load_tile(T_rows, slots * CHUNK, CHUNK, slot * CHUNK, 0, CHUNK, CHUNK, TMA)
        row = table + (chunk0 * H + slot) * COLUMNS * CHUNK + rows
        e = tl.load(row)
        r = tl.load(row + 2 * CHUNK)
        if SCORES:
            P = load_tile(P_rows, slots * CHUNK, CHUNK, slot * CHUNK, 0, CHUNK, CHUNK, TMA)
            P_transposed = tl.trans(P)
        else:
            pairs = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            if DECAYS:
                pairs = decay_pairs(pairs, r, tl.load(row + 3 * CHUNK), 1, BOUNDED)
            else:
                pairs *= r[None, :]
            P_transposed = tl.where(rows[:, None] <= rows[None, :], pairs, 0.0).to(DTYPE)

        dSd = dS.to(DTYPE)
        if STORE:
            if TMA:
                dS_rows.store([slot * K, column0], dSd)
            else:
                store_state(d_states + (chunk0 * H + slot) * K * V, K, V, BK, BV, column0, dSd)
        dX = tl.dot(key, dSd, input_precision=PRECISION)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            b_end = tl.min(b, 0)
            keep = tl.exp(b)
            e *= keep
            r *= keep
            dX *= tl.exp(b_end - b)[:, None]
            dS *= tl.exp(b_end)
        dX += tl.dot(P_transposed, d_out, input_precision=PRECISION)
        dXd = dX.to(DTYPE)
        if WRITES:
            dR = tl.dot(tl.trans(Tm), dXd, dX - dXd.to(tl.float32), input_precision=PRECISION)
        else:
            dR = tl.dot(tl.trans(Tm), dXd, input_precision=PRECISION)
        if STORE:
            if WRITES:
                value = load_tile(v_rows, length, v_token, c * CHUNK, column0, V, BV, TMA)
                at = (c * CHUNK + rows) * (H * BLOCKS)
                tl.store(own_writes + at, tl.sum(dR * value.to(tl.float32), 1), mask=c * CHUNK + rows < length)
            w = tl.load(row + CHUNK)
            d_value = (w[:, None] * dR).to(dv.dtype.element_ty)
            store_tile(dv_rows, length, H * V, c * CHUNK, column0, d_value, V, BV, TMA)
            if SOLVED:
                store_tile(dR_rows, slots * CHUNK, V, slot * CHUNK, column0, dR.to(DTYPE), V, BV, TMA)
        d_read = (r[:, None] * d_out.to(tl.float32)).to(DTYPE)
        dS += tl.dot(tl.trans(query), d_read, input_precision=PRECISION)
        dS -= tl.dot(tl.trans(key), (e[:, None] * dR).to(DTYPE), input_precision=PRECISION)
    if D_INITIAL:
        # without STORE there is one gradient per segment; with it, only unsplit sequences come here
        index = n * SEGMENTS + segment
        store_state(d_initial + (index * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0, dS)
