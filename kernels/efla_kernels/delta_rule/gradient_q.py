"""Kernel 4, parallel over chunks: the gradient of q, and the part of its algebra that k's gradient shares.

With S the state before the chunk, X what the scan solved for, Gamma_ij = exp(b_i - b_j), q_hat = r q:

    N = tril(dO X^T) * Gamma        dq_hat = exp(b) dO S^T + N K

and through the normalisation of q. r N is stored for `gradient_k_kernel`, which needs its transpose. All that b_i
does to the outputs it does as a factor of q_hat_i and of k_i, so that its gradient's part here is q_hat_i . dq_hat_i,
which the normalisation needs anyway; `gradient_k_kernel` subtracts the columns of the same pairs, formed from the same
rounded r N, so that pairs that no decay separates cancel to fp32's rounding. A pair of a token with itself has no decay
at all: where decays may be strong, all others are small beside it, and it enters after the row sum.

The loads come before the products that they are summed with: Triton then takes the sum in the product's layout instead
of moving the product to the load's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.delta_rule.gates import GATED_EFLA, RAW, decay_pairs
from efla_kernels.launch.tiles import CHUNK, chunk_span, load_rows, load_state, store_rows


@triton.jit
def gradient_q_kernel(
    q, k, do, table, states, solved, cu_seqlens, first_chunk, chunk_sequence,
    dq,  # out [B, T, H, K]
    d_scores,  # out r N [chunks, H, C, C]
    d_decay,  # out [B, T, H] fp32: q_hat . dq_hat, of which `gradient_k_kernel` makes the decay's gradient
    T, scale, q_token, q_head, k_token, k_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, MODE: tl.constexpr,
    DECAYS: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BOUNDED: tl.constexpr = MODE == GATED_EFLA and tl.bfloat16 == DTYPE
    STRONG: tl.constexpr = DECAYS and MODE != GATED_EFLA
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        slot = m * H + h
        COLUMNS: tl.constexpr = 5 if DECAYS else 4
        row = table + slot * COLUMNS * CHUNK + rows
        r = tl.load(row + 2 * CHUNK)
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        N = tl.zeros([CHUNK, CHUNK], tl.float32)
        d_query = tl.zeros([CHUNK, BK], tl.float32)
        for column0 in range(0, V, BV):
            d_out = load_rows(do + (first * H + h) * V, H * V, left, V, BV, column0, DTYPE)
            X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            S = load_state(states + slot * K * V, K, V, BK, BV, column0)
            N += tl.dot(d_out, tl.trans(X), input_precision=PRECISION)
            d_query += tl.dot(d_out, tl.trans(S), input_precision=PRECISION)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            N = decay_pairs(N, r, b, 0, BOUNDED)
            d_query *= (r * tl.exp(b))[:, None]
        else:
            N *= r[:, None]
            d_query *= r[:, None]
        N = tl.where(rows[:, None] >= rows[None, :], N, 0.0).to(DTYPE)
        tl.store(d_scores + tile, N)
        key = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
        query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, tl.float32)
        if STRONG:
            own = rows[:, None] == rows[None, :]
            others = tl.where(own, 0.0, N).to(DTYPE)
            d_query = tl.dot(others, key, d_query, input_precision=PRECISION)
            tl.store(d_decay + (first + rows) * H + h, tl.sum(d_query * query, 1), mask=rows < left)
            N = tl.where(own, N, 0.0).to(DTYPE)
        d_query = tl.dot(N, key, d_query, input_precision=PRECISION)
        if MODE != RAW:
            along = tl.sum(d_query * query, 1)
            if DECAYS and not STRONG:
                tl.store(d_decay + (first + rows) * H + h, along, mask=rows < left)
            # q_hat = r q with r = scale / sqrt(|q|^2 + eps): r (d - q (q.d) r^2 / scale^2)
            d_query -= query * (along * (r * r) / (scale * scale))[:, None]
        store_rows(dq + (first * H + h) * K, H * K, left, K, BK, 0, d_query)
