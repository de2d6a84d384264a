"""Kernel 4, parallel over chunks: the gradient of q.

With S the state before the chunk, X what the scan solved for, Gamma_ij = exp(b_i - b_j), q_hat = r q:

    N = tril(dO X^T) * Gamma        dq_hat = exp(b) dO S^T + N K

and through the normalisation of q. The decay's gradient from reading the state, the sum over i >= t of
exp(b_i) q_hat_i . S dO_i, falls out on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.triton.gates import GATED_EFLA, RAW
from efla_kernels.triton.tiles import CHUNK, chunk_span, load_rows, load_state, store_rows


@triton.jit
def gradient_q_kernel(
    q,
    k,
    decay,
    do,
    table,
    states,
    solved,
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    dq,  # out [B, T, H, K]
    d_decay,  # out [B, T, H] fp32: the part of the decay's gradient that comes from reading the state
    T,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    MODE: tl.constexpr,
    DECAYS: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        slot = m * H + h
        COLUMNS: tl.constexpr = 4 if DECAYS else 3
        row = table + slot * COLUMNS * CHUNK + rows
        r = tl.load(row + 2 * CHUNK)
        causal = rows[:, None] >= rows[None, :]
        N = tl.zeros([CHUNK, CHUNK], tl.float32)
        d_read = tl.zeros([CHUNK, BK], tl.float32)
        for column0 in range(0, V, BV):
            d_out = load_rows(do + (first * H + h) * V, H * V, left, V, BV, column0, DTYPE)
            X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            S = load_state(states + slot * K * V, K, V, BK, BV, column0)
            N += tl.dot(d_out, tl.trans(X), input_precision=PRECISION)
            d_read += tl.dot(d_out, tl.trans(S), input_precision=PRECISION)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            inside = rows < left
            at = (first + rows) * H + h
            d_read *= tl.exp(b)[:, None]
            N *= tl.exp(tl.where(causal, b[:, None] - b[None, :], 0.0))
            query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, tl.float32)
            d_b = r * tl.sum(d_read * query, 1)
            d_log_decay = tl.sum(d_b, 0) - tl.cumsum(d_b, 0) + d_b
            if MODE == GATED_EFLA:  # log_decay = exp(log_g) - 1
                d_log_decay *= tl.exp(tl.load(decay + at, mask=inside, other=0.0).to(tl.float32))
            tl.store(d_decay + at, d_log_decay, mask=inside)
        key = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
        d_read += tl.dot(tl.where(causal, N, 0.0).to(DTYPE), key, input_precision=PRECISION)
        if MODE != RAW:
            # q_hat = r q with r = scale / sqrt(|q|^2 + eps): r (d - q (q.d) r^2 / scale^2)
            query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, tl.float32)
            along = tl.sum(d_read * query, 1) * (r * r) / (scale * scale)
            d_read -= query * along[:, None]
        store_rows(dq + (first * H + h) * K, H * K, left, K, BK, 0, d_read * r[:, None])
