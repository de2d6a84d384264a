"""Kernel 3, serial over the chunks in reverse, parallel over heads and columns of v: gradients of the states.

With dS the gradient of the state after the chunk and the other symbols of the forward scan:

    dX = P^T dO + exp(b_C - b) K dS        dR = T^T dX        dV = w dR
    dS_before = exp(b_C) dS + (r exp(b) Q)^T dO - (e exp(b) K)^T dR

Saves dS (after each chunk) and dR for the chunk-parallel gradients of q, k and the gates.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.triton.tiles import CHUNK, load_rows, load_state, scan_place, sequence_span, store_rows, store_state


@triton.jit
def scan_backward_kernel(
    q,
    k,
    do,
    inverse,
    scores,
    table,
    d_final,  # [N, segments, H, K, V] fp32: gradient of the state at each segment's end, or unused
    cu_seqlens,
    first_chunk,
    dv,  # out [B, T, H, V]
    d_initial,  # out [N, H, K, V] fp32, or unused
    d_states,  # out [chunks, H, K, V]
    d_solved,  # out dR [chunks, H, C, V]
    T,
    chunks_per_segment,
    q_token,
    q_head,
    k_token,
    k_head,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DECAYS: tl.constexpr,
    D_FINAL: tl.constexpr,
    D_INITIAL: tl.constexpr,
    STORE: tl.constexpr,  # False: only the state's gradient is wanted (first pass of a split sequence)
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    n, segment, h, column0 = scan_place(H, V, BV, SEGMENTS)
    first, length, chunk0 = sequence_span(n, T, cu_seqlens, first_chunk, PACKED)
    rows = tl.arange(0, CHUNK)
    COLUMNS: tl.constexpr = 4 if DECAYS else 3

    start = segment * chunks_per_segment
    chunks = tl.cdiv(length, CHUNK) - start
    if SEGMENTS > 1:
        chunks = tl.minimum(chunks, chunks_per_segment)
    dS = tl.zeros([BK, BV], tl.float32)
    if D_FINAL:
        dS = load_state(d_final + ((n * SEGMENTS + segment) * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0)
    for step in tl.range(0, chunks, num_stages=STAGES):
        c = start + chunks - 1 - step
        token = first + c * CHUNK
        left = length - c * CHUNK
        slot = (chunk0 + c) * H + h
        query = load_rows(q + token * q_token + h * q_head, q_token, left, K, BK, 0, DTYPE)
        key = load_rows(k + token * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
        d_out = load_rows(do + (token * H + h) * V, H * V, left, V, BV, column0, DTYPE)
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        Tm = tl.load(inverse + tile)
        P = tl.load(scores + tile)
        row = table + slot * COLUMNS * CHUNK + rows
        e = tl.load(row)
        r = tl.load(row + 2 * CHUNK)

        dSd = dS.to(DTYPE)
        if STORE:
            store_state(d_states + slot * K * V, K, V, BK, BV, column0, dSd)
        dX = tl.dot(key, dSd, input_precision=PRECISION)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            b_end = tl.min(b, 0)
            keep = tl.exp(b)
            e *= keep
            r *= keep
            dX *= tl.exp(b_end - b)[:, None]
            dS *= tl.exp(b_end)
        dX += tl.dot(tl.trans(P), d_out, input_precision=PRECISION)
        dR = tl.dot(tl.trans(Tm), dX.to(DTYPE), input_precision=PRECISION)
        if STORE:
            w = tl.load(row + CHUNK)
            store_rows(dv + (token * H + h) * V, H * V, left, V, BV, column0, w[:, None] * dR)
            store_rows(d_solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, dR)
        d_read = (r[:, None] * d_out.to(tl.float32)).to(DTYPE)
        dS += tl.dot(tl.trans(query), d_read, input_precision=PRECISION)
        dS -= tl.dot(tl.trans(key), (e[:, None] * dR).to(DTYPE), input_precision=PRECISION)
    if D_INITIAL:
        # without STORE there is one gradient per segment; with it, only unsplit sequences come here
        index = n * SEGMENTS + segment
        store_state(d_initial + (index * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0, dS)
