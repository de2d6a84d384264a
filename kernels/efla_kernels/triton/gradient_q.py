"""Kernel 4, parallel over chunks: the gradient of q, and the part of its algebra that k's gradient shares.

With S the state before the chunk, X what the scan solved for, Gamma_ij = exp(b_i - b_j), q_hat = r q:

    N = tril(dO X^T) * Gamma        dq_hat = exp(b) dO S^T + N K

and through the normalisation of q. r N is stored for `gradient_k_kernel`, which needs its transpose. The decay's
gradient has two parts here: with P_ij and its gradient dP = dO X^T, the pairs Z_ij = P_ij dP_ij, and what the states'
reading depends on; d b_i = sum_j Z_ij - sum_j Z_ji + r exp(b_i) q_i . S dO_i, summed back from the chunk's end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.triton.gates import RAW
from efla_kernels.triton.tiles import CHUNK, chunk_span, load_rows, load_state, store_rows


@triton.jit
def gradient_q_kernel(
    q,
    k,
    do,
    scores,
    table,
    states,
    solved,
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    dq,  # out [B, T, H, K]
    d_scores,  # out r N [chunks, H, C, C]
    d_decay,  # out [B, T, H] fp32: the part of log_decay's gradient that does not come through k
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
        before = tl.where(rows[:, None] < rows[None, :], 1.0, 0.0)
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
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
            Z = N * tl.load(scores + tile).to(tl.float32)  # P holds r and Gamma, and zeros above its diagonal
            d_read *= tl.exp(b)[:, None]
            query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, tl.float32)
            reading = r * tl.sum(d_read * query, 1)
            pairs = tl.dot(Z.to(DTYPE), before.to(DTYPE), input_precision=PRECISION)  # [i, t]: Z_ij of all j < t
            d_ld = tl.sum(tl.where(causal, pairs + reading[:, None], 0.0), 0)
            tl.store(d_decay + (first + rows) * H + h, d_ld, mask=rows < left)
            N *= tl.exp(tl.where(causal, b[:, None] - b[None, :], 0.0))
        N = tl.where(causal, N, 0.0)
        tl.store(d_scores + tile, (N * r[:, None]).to(DTYPE))
        key = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
        d_read += tl.dot(N.to(DTYPE), key, input_precision=PRECISION)
        if MODE != RAW:
            # q_hat = r q with r = scale / sqrt(|q|^2 + eps): r (d - q (q.d) r^2 / scale^2)
            query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, tl.float32)
            along = tl.sum(d_read * query, 1) * (r * r) / (scale * scale)
            d_read -= query * along[:, None]
        store_rows(dq + (first * H + h) * K, H * K, left, K, BK, 0, d_read * r[:, None])
