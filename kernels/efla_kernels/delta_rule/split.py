"""Kernels that cut one long sequence into segments which run side by side.

A segment maps its first state to its last by S' = M S + N, with M [K, K] the product of its tokens' transitions and N
the state that it builds from zeros. Both come from the state part of the scan (started from the identity without v, and
from zeros with v); a short serial pass over the segments then gives each one's first state, from which all run at once:

    S_{s+1} = M_s S_s + N_s              backward: dS_s = M_s^T dS_{s+1} + L_s

L_s is the gradient that segment s sends to its first state when its last state's gradient is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.tiles import CHUNK, load_state, load_tile, matrix, scan_place, sequence_span, store_state


@triton.jit(do_not_specialize=["chunks_per_segment"])
def transition_kernel(
    k, v, inverse, table, cu_seqlens, first_chunk,
    transitions,  # out M [N, segments, H, K, K] fp32
    built,  # out N [N, segments, H, K, V] fp32
    T, chunks_per_segment, k_token, k_head, v_token, v_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SEGMENTS: tl.constexpr,
    DECAYS: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    V_BLOCKS: tl.constexpr = (V + BV - 1) // BV
    n, segment, h, place = scan_place(H, V_BLOCKS * BV + K, BV, SEGMENTS)
    first, length, chunk0 = sequence_span(n, T, cu_seqlens, first_chunk, False)
    rows = tl.arange(0, CHUNK)
    COLUMNS: tl.constexpr = 5 if DECAYS else 4
    of_state = place >= V_BLOCKS * BV  # these programs carry columns of M, the others columns of N
    column0 = tl.where(of_state, place - V_BLOCKS * BV, place)

    diagonal = tl.arange(0, BK)[:, None] == column0 + tl.arange(0, BV)[None, :]
    S = tl.where(of_state & diagonal, 1.0, 0.0)
    start = segment * chunks_per_segment
    end = tl.minimum(tl.cdiv(length, CHUNK), start + chunks_per_segment)
    slots = tl.cdiv(length, CHUNK) * H
    k_rows = matrix(k + first * k_token + h * k_head, length, k_token, K, BK, TMA)
    v_rows = matrix(v + first * v_token + h * v_head, tl.where(of_state, 0, length), v_token, V, BV, TMA)
    T_rows = matrix(inverse + chunk0 * H * CHUNK * CHUNK, slots * CHUNK, CHUNK, CHUNK, CHUNK, TMA)
    for c in tl.range(start, end, num_stages=STAGES):
        slot = c * H + h
        key = load_tile(k_rows, length, k_token, c * CHUNK, 0, K, BK, TMA).to(DTYPE)
        value = load_tile(v_rows, tl.where(of_state, 0, length), v_token, c * CHUNK, column0, V, BV, TMA).to(tl.float32)
        Tm = load_tile(T_rows, slots * CHUNK, CHUNK, slot * CHUNK, 0, CHUNK, CHUNK, TMA)
        row = table + (chunk0 * H + slot) * COLUMNS * CHUNK + rows
        e = tl.load(row)
        w = tl.where(of_state, 0.0, tl.load(row + CHUNK))  # columns of M are built without v
        erased = tl.dot(key, S.to(DTYPE), input_precision=PRECISION)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            b_end = tl.min(b, 0)
            erased *= tl.exp(b)[:, None]
            S *= tl.exp(b_end)
        X = tl.dot(Tm, (w[:, None] * value - e[:, None] * erased).to(DTYPE), input_precision=PRECISION)
        if DECAYS:
            X *= tl.exp(b_end - b)[:, None]
        S += tl.dot(tl.trans(key), X.to(DTYPE), input_precision=PRECISION)
    at = ((n * SEGMENTS + segment) * H + h).to(tl.int64)
    if of_state:
        store_state(transitions + at * K * K, K, K, BK, BV, column0, S)
    else:
        store_state(built + at * K * V, K, V, BK, BV, column0, S)


@triton.jit
def merge_kernel(
    transitions,  # M [N, segments, H, K, K] fp32
    local,  # forward N, backward L [N, segments, H, K, V] fp32
    outer,  # forward the initial state, backward the final state's gradient [N, H, K, V] fp32, or unused
    carried,  # out [N, segments, H, K, V] fp32: forward each segment's first state, backward its last state's gradient
    left_over,  # out [N, H, K, V] fp32, backward only: the gradient of the initial state, or unused
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SEGMENTS: tl.constexpr,
    REVERSE: tl.constexpr, OUTER: tl.constexpr, LEFT_OVER: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    n, _, h, column0 = scan_place(H, V, BV, 1)
    S = tl.zeros([BK, BV], tl.float32)
    if OUTER:
        S = load_state(outer + (n * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0)
    for step in tl.range(0, SEGMENTS, num_stages=STAGES):
        segment = SEGMENTS - 1 - step if REVERSE else step
        at = ((n * SEGMENTS + segment) * H + h).to(tl.int64)
        store_state(carried + at * K * V, K, V, BK, BV, column0, S)
        M = load_state(transitions + at * K * K, K, K, BK, BK, 0)
        if REVERSE:
            M = tl.trans(M)
        S = load_state(local + at * K * V, K, V, BK, BV, column0) + tl.dot(M, S, input_precision=PRECISION)
    if LEFT_OVER:
        store_state(left_over + (n * H + h).to(tl.int64) * K * V, K, V, BK, BV, column0, S)
