"""Kernels 4 and 5 in one, parallel over chunks, without a decay: the gradients of q, k and the gate.

The algebra of `gradient_q_kernel` and `gradient_k_kernel`, with every tile read from memory once. dV = w dR replaces
dR, which is then not written. e / w does not depend on beta (1 for EFLA, 1 / |k| for DeltaNet), so that no division by
w is needed:

    N = tril(r dO X^T)            dq_hat = r dO S^T + N K
    M = -(e / w) stril(dV X^T)    dK = X dS^T - (e / w) dV S^T + M K + M^T K + N^T Q    rowsum(dV * X) / w = dL/d ln a

All of V is taken at once: in a loop over blocks of V four sums would be held at a time, two of them C x K, which no
thread has the registers for. Here q's gradient is done before k's begins. Nothing is pipelined then: what comes later
is asked for at the start (`ask_for_rows`), and what the program `AHEAD` places on needs first, in the middle. Four
warps: eight would each compute all 64 rows' products, which Triton's layout of products that feed one another does not
divide among more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.delta_rule.gates import coefficient_gradients, erase_over_write
from efla_kernels.launch.tiles import CHUNK, ask_for_rows, chunk_span, load_rows, load_state, store_rows

AHEAD = tl.constexpr(264)  # two programs on each of an H200's multiprocessors


@triton.jit
def gradient_kernel(
    q, k, do, gate, table, states, solved, d_states, dv, cu_seqlens, first_chunk, chunk_sequence,
    dq,  # out [B, T, H, K]
    dk,  # out [B, T, H, K]
    d_gate,  # out [B, T, H] in the gate's type: d logit
    T, scale, q_token, q_head, k_token, k_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, MODE: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        slot = m * H + h
        row = table + slot * 4 * CHUNK + rows
        at = (first + rows) * H + h
        inside = rows < left
        q_rows = q + first * q_token + h * q_head
        k_rows = k + first * k_token + h * k_head
        dv_rows = dv + (first * H + h) * V

        d_out = load_rows(do + (first * H + h) * V, H * V, left, V, V, 0, DTYPE)
        X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, V, 0, DTYPE)
        S = load_state(states + slot * K * V, K, V, K, V, 0)
        r = tl.load(row + 2 * CHUNK)
        w = tl.load(row + CHUNK)
        lam = tl.load(row + 3 * CHUNK)
        ask_for_rows(k_rows, k_token, left, K)
        ask_for_rows(q_rows, q_token, left, K)
        ask_for_rows(dv_rows, H * V, left, V)
        ask_for_rows(d_states + slot * K * V, V, K, V, K)
        N = tl.dot(d_out, tl.trans(X), input_precision=PRECISION)
        key = load_rows(k_rows, k_token, left, K, K, 0, DTYPE)
        d_query = tl.dot(d_out, tl.trans(S), input_precision=PRECISION)
        N = tl.where(rows[:, None] >= rows[None, :], N * r[:, None], 0.0).to(DTYPE)
        dV = load_rows(dv_rows, H * V, left, V, V, 0, DTYPE)
        query = load_rows(q_rows, q_token, left, K, K, 0, DTYPE)
        d_query = tl.dot(N, key, d_query * r[:, None], input_precision=PRECISION)
        # q_hat = r q with r = scale / sqrt(|q|^2 + eps): r (d - q (q.d) r^2 / scale^2)
        wide = query.to(tl.float32)
        along = tl.sum(d_query * wide, 1)
        d_query -= wide * (along * (r * r) / (scale * scale))[:, None]
        store_rows(dq + (first * H + h) * K, H * K, left, K, K, 0, d_query)

        M = tl.dot(dV, tl.trans(X), input_precision=PRECISION)
        d_key = tl.dot(dV, tl.trans(S), input_precision=PRECISION)
        later = tl.program_id(0) + AHEAD
        if later < tl.num_programs(0):
            next = later.to(tl.int64)
            there, rest, taken = chunk_span(next // H, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
            if taken:
                ask_for_rows(solved + next * CHUNK * V, V, CHUNK, V)
                ask_for_rows(states + next * K * V, V, K, V, K)
                ask_for_rows(do + (there * H + next % H) * V, H * V, rest, V)
        dS = load_state(d_states + slot * K * V, K, V, K, V, 0)
        # where w is less than that, so is X, and the sum is 0 in fp32
        s = tl.sum(tl.where(rows[:, None] == rows[None, :], M, 0.0), 1) / tl.maximum(w, 1e-30)
        ratio = erase_over_write(MODE, lam)
        M = tl.where(rows[:, None] > rows[None, :], M * -ratio[:, None], 0.0).to(DTYPE)
        d_key = tl.dot(M, key, d_key * -ratio[:, None], input_precision=PRECISION)
        d_key = tl.dot(tl.trans(M), key, d_key, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(N), query, d_key, input_precision=PRECISION)
        d_key = tl.dot(X, tl.trans(dS), d_key, input_precision=PRECISION)

        # k once more: held since its products it would take a quarter of the registers
        wide = load_rows(k_rows, k_token, left, K, K, 0, tl.float32)
        logit = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        none = tl.zeros([CHUNK], tl.float32)
        k_dk = tl.sum(d_key * wide, 1)
        d_logit, _, d_lam = coefficient_gradients(MODE, logit, none, lam, none, s, k_dk, none)
        d_key += 2.0 * d_lam[:, None] * wide
        tl.store(d_gate + at, d_logit, mask=inside)
        store_rows(dk + (first * H + h) * K, H * K, left, K, K, 0, d_key)
