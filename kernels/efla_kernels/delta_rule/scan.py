"""Kernel 2, serial over the chunks of a sequence, parallel over heads and columns of v: states and outputs.

With S the state before the chunk and T, P, e, w, r, b from the first kernel:

    R = w V - e exp(b) K S        X = T R        O = r exp(b) Q S + P X        S' = exp(b_C) S + (exp(b_C - b) K)^T X

Saves S (before each chunk) and X for the backward pass where asked, and leaves O out where the backward pass asks for
them alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
def scan_kernel(
    q, k, v, inverse, scores, table,
    initial,  # [N, segments, H, K, V] fp32, or unused
    cu_seqlens, first_chunk,
    o,  # out [B, T, H, V]
    final,  # out [N, H, K, V] fp32, or unused
    states,  # out [chunks, H, K, V], or unused
    solved,  # out X [chunks, H, C, V], or unused
    T, chunks_per_segment, q_token, q_head, k_token, k_head, v_token, v_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SEGMENTS: tl.constexpr,
    DECAYS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, SAVE: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n, segment, h, column0 = scan_place(H, V, BV, SEGMENTS)
    first, length, chunk0 = sequence_span(n, T, cu_seqlens, first_chunk, PACKED)
    rows = tl.arange(0, CHUNK)
    COLUMNS: tl.constexpr = 5 if DECAYS else 4

    S = tl.zeros([BK, BV], tl.float32)
    if INITIAL:
        S = load_state(initial + ((n * SEGMENTS + segment) * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0)
    chunks = tl.cdiv(length, CHUNK)
    start = segment * chunks_per_segment
    if SEGMENTS > 1:
        chunks = tl.minimum(chunks, start + chunks_per_segment)
    slots = tl.cdiv(length, CHUNK) * H  # of this sequence, in the buffers of chunk data
    k_rows = matrix(k + first * k_token + h * k_head, length, k_token, K, BK, TMA)
    v_rows = matrix(v + first * v_token + h * v_head, length, v_token, V, BV, TMA)
    T_rows = matrix(inverse + chunk0 * H * CHUNK * CHUNK, slots * CHUNK, CHUNK, CHUNK, CHUNK, TMA)
    if OUTPUT:
        q_rows = matrix(q + first * q_token + h * q_head, length, q_token, K, BK, TMA)
        P_rows = matrix(scores + chunk0 * H * CHUNK * CHUNK, slots * CHUNK, CHUNK, CHUNK, CHUNK, TMA)
        o_rows = matrix(o + (first * H + h) * V, length, H * V, V, BV, TMA)
    if SAVE:
        X_rows = matrix(solved + chunk0 * H * CHUNK * V, slots * CHUNK, V, V, BV, TMA)
        if TMA:
            S_rows = tl.make_tensor_descriptor(states + chunk0 * H * K * V, [slots * K, V], [V, 1], [BK, BV])
    for c in tl.range(start, chunks, num_stages=STAGES):
        slot = c * H + h
        if OUTPUT:
            query = load_tile(q_rows, length, q_token, c * CHUNK, 0, K, BK, TMA).to(DTYPE)
        key = load_tile(k_rows, length, k_token, c * CHUNK, 0, K, BK, TMA).to(DTYPE)
        value = load_tile(v_rows, length, v_token, c * CHUNK, column0, V, BV, TMA).to(tl.float32)
        Tm = load_tile(T_rows, slots * CHUNK, CHUNK, slot * CHUNK, 0, CHUNK, CHUNK, TMA)
        row = table + (chunk0 * H + slot) * COLUMNS * CHUNK + rows
        e = tl.load(row)
        w = tl.load(row + CHUNK)
        if OUTPUT:
            P = load_tile(P_rows, slots * CHUNK, CHUNK, slot * CHUNK, 0, CHUNK, CHUNK, TMA)
            r = tl.load(row + 2 * CHUNK)

        Sd = S.to(DTYPE)
        if SAVE:
            if TMA:
                S_rows.store([slot * K, column0], Sd)
            else:
                store_state(states + (chunk0 * H + slot) * K * V, K, V, BK, BV, column0, Sd)
        erased = tl.dot(key, Sd, input_precision=PRECISION)
        if OUTPUT:
            read = tl.dot(query, Sd, input_precision=PRECISION)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            b_end = tl.min(b, 0)  # b never grows, so its last entry is its least
            keep = tl.exp(b)
            e *= keep
            if OUTPUT:
                r *= keep
            S *= tl.exp(b_end)
        R = w[:, None] * value - e[:, None] * erased
        X = tl.dot(Tm, R.to(DTYPE), input_precision=PRECISION)
        Xd = X.to(DTYPE)
        if OUTPUT:
            out = r[:, None] * read + tl.dot(P, Xd, input_precision=PRECISION)
        if SAVE:
            store_tile(X_rows, slots * CHUNK, V, slot * CHUNK, column0, Xd, V, BV, TMA)
        if DECAYS:
            Xd = (X * tl.exp(b_end - b)[:, None]).to(DTYPE)
        S += tl.dot(tl.trans(key), Xd, input_precision=PRECISION)
        if OUTPUT:
            store_tile(o_rows, length, H * V, c * CHUNK, column0, out.to(o.dtype.element_ty), V, BV, TMA)
    # an empty sequence has one segment and hands its initial state on
    if FINAL and start + chunks_per_segment >= tl.cdiv(length, CHUNK):
        store_state(final + (n * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0, S)
