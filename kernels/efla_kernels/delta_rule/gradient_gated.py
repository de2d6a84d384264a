"""Kernels 4 and 5 in one for Gated EFLA, parallel over chunks: the gradients of q, k and both gates.

The algebra and the order of `gradient_q_kernel` and `gradient_k_kernel`, with every tile read from memory once; see
`gradient.py` for what it costs to take all of V at once. q_hat . dq_hat, a part of the decay's gradient, stays in
registers. <S, dS> is the trace of S^T dS: summed entry by entry, both tiles would be moved out of the products' layout.
k, X and b are loaded once more for the second half: held through S^T dS they would spill.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.delta_rule.gates import coefficient_gradients, decay_pairs
from efla_kernels.launch.tiles import CHUNK, ask_for_rows, chunk_span, load_rows, load_state, store_rows


@triton.jit
def gradient_gated_kernel(
    q, k, do, gate, decay, table, states, solved, d_states, d_solved,
    d_writes,  # rowsum(dR * V) of every block of V [B, T, H, BLOCKS] fp32
    cu_seqlens, first_chunk, chunk_sequence,
    dq,  # out [B, T, H, K]
    dk,  # out [B, T, H, K]
    d_gate,  # out [B, T, H] in the gate's type: d logit
    d_decay,  # out [B, T, H] fp32: d log_g
    T, scale, q_token, q_head, k_token, k_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCKS: tl.constexpr, MODE: tl.constexpr, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BOUNDED: tl.constexpr = tl.bfloat16 == DTYPE
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        slot = m * H + h
        row = table + slot * 5 * CHUNK + rows
        at = (first + rows) * H + h
        inside = rows < left
        q_rows = q + first * q_token + h * q_head
        k_rows = k + first * k_token + h * k_head

        d_out = load_rows(do + (first * H + h) * V, H * V, left, V, V, 0, DTYPE)
        X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, V, 0, DTYPE)
        S = load_state(states + slot * K * V, K, V, K, V, 0)
        r = tl.load(row + 2 * CHUNK)
        b = tl.load(row + 3 * CHUNK)
        ask_for_rows(k_rows, k_token, left, K)
        ask_for_rows(q_rows, q_token, left, K)
        ask_for_rows(d_states + slot * K * V, V, K, V, K)
        ask_for_rows(d_solved + slot * CHUNK * V, V, CHUNK, V)
        N = tl.dot(d_out, tl.trans(X), input_precision=PRECISION)
        key = load_rows(k_rows, k_token, left, K, K, 0, DTYPE)
        d_query = tl.dot(d_out, tl.trans(S), input_precision=PRECISION)
        N = tl.where(rows[:, None] >= rows[None, :], decay_pairs(N, r, b, 0, BOUNDED), 0.0).to(DTYPE)
        query = load_rows(q_rows, q_token, left, K, K, 0, tl.float32)
        d_query = tl.dot(N, key, d_query * (r * tl.exp(b))[:, None], input_precision=PRECISION)
        along = tl.sum(d_query * query, 1)
        # q_hat = r q with r = scale / sqrt(|q|^2 + eps): r (d - q (q.d) r^2 / scale^2)
        d_query -= query * (along * (r * r) / (scale * scale))[:, None]
        store_rows(dq + (first * H + h) * K, H * K, left, K, K, 0, d_query)

        dS = load_state(d_states + slot * K * V, K, V, K, V, 0)
        columns = tl.arange(0, V)
        trace = tl.dot(tl.trans(S), dS, input_precision=PRECISION)
        kept = tl.sum(tl.sum(tl.where(columns[:, None] == columns[None, :], trace, 0.0), 1), 0)
        dR = load_rows(d_solved + slot * CHUNK * V, V, CHUNK, V, V, 0, DTYPE)
        M = tl.dot(dR, tl.trans(X), input_precision=PRECISION)
        d_key = tl.dot(dR, tl.trans(S), input_precision=PRECISION)
        e = tl.load(row)
        M = tl.where(rows[:, None] > rows[None, :], decay_pairs(M, -e, b, 0, BOUNDED), 0.0).to(DTYPE)
        key = load_rows(k_rows, k_token, left, K, K, 0, DTYPE)
        wide = key.to(tl.float32)
        d_key = tl.dot(M, key, d_key * -(e * tl.exp(b))[:, None], input_precision=PRECISION)
        d_erase = tl.sum(d_key * wide, 1)
        b = tl.load(row + 3 * CHUNK)
        b_end = tl.min(b, 0)
        X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, V, 0, DTYPE)
        X = (X.to(tl.float32) * tl.exp(b_end - b)[:, None]).to(DTYPE)
        d_key = tl.dot(X, tl.trans(dS), d_key, input_precision=PRECISION)
        from_write = tl.sum(d_key * wide, 1) - d_erase
        d_key = tl.dot(tl.trans(M), key, d_key, input_precision=PRECISION)
        query = load_rows(q_rows, q_token, left, K, K, 0, DTYPE)
        d_key = tl.dot(tl.trans(N), query, d_key, input_precision=PRECISION)

        k_dk = tl.sum(d_key * wide, 1)
        d_b = along + 2.0 * d_erase - k_dk
        at_end = tl.sum(from_write, 0) + tl.exp(b_end) * kept
        d_log_decay = tl.sum(d_b, 0) - tl.cumsum(d_b, 0) + d_b + at_end
        d_write = tl.zeros([CHUNK], tl.float32)
        for block in tl.static_range(BLOCKS):
            d_write += tl.load(d_writes + at * BLOCKS + block, mask=inside, other=0.0)
        d_write *= tl.load(row + CHUNK)
        logit = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        log_g = tl.load(decay + at, mask=inside, other=0.0).to(tl.float32)
        lam = tl.load(row + 4 * CHUNK)
        d_logit, d_log_g, d_lam = coefficient_gradients(MODE, logit, log_g, lam, d_erase, d_write, k_dk, d_log_decay)
        d_key += 2.0 * d_lam[:, None] * wide
        tl.store(d_gate + at, d_logit, mask=inside)
        tl.store(d_decay + at, d_log_g, mask=inside)
        store_rows(dk + (first * H + h) * K, H * K, left, K, K, 0, d_key)
