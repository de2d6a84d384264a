"""Kernel 5, parallel over chunks: the gradients of k and of the gates.

With S the state before the chunk, dS the gradient after it, Gamma_ij = exp(b_i - b_j), X and dR of the scans, and r N
of `gradient_q_kernel`:

    M  = -e stril(dR X^T) * Gamma
    D  = M K - e exp(b) dR S^T                             what k_i erases
    W  = exp(b_C - b) X dS^T + M^T K + (r N)^T Q           what k_i writes
    dK = D + W      rowsum(K * D) = dL/d ln e      w rowsum(dR * V) = dL/d ln w
    rowsum(dR * X) = dL/d ln e + dL/d ln w         which is all that EFLA and DeltaNet need

b_i is a factor of q_hat_i, of the k_i that erases and, inverted, of the k_i that writes, so that its gradient is
q_hat_i . dq_hat_i + k_i . D_i - k_i . W_i, summed back from the chunk's end, where the state's own gradient is
sum(exp(b_C - b) k . X dS^T) + exp(b_C) <S, dS>. Nothing cancels but pairs (i, j) within the sum, and these are the same
rounded numbers in D as in W. M^T is formed as X dR^T, not by transposing M. <S, dS> is the trace of S^T dS.

The order is one of registers: D needs its row sum before W is added to it, and k comes after the loops that have no
use for it, but before the products that it is summed with (see `gradient_q_kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.delta_rule.gates import GATED_EFLA, RAW, coefficient_gradients, decay_pairs
from efla_kernels.launch.tiles import CHUNK, chunk_span, load_rows, load_state, store_rows


@triton.jit
def gradient_k_kernel(
    q, k, gate, decay, d_scores, table, states, solved, d_states, d_solved,
    d_writes,  # rowsum(dR * V) of every block of V [B, T, H, BLOCKS] fp32; not read for EFLA and DeltaNet
    cu_seqlens, first_chunk, chunk_sequence,
    dk,  # out [B, T, H, K]
    d_gate,  # out [B, T, H] in the gate's type: d logit; RAW: d erase
    d_write,  # out [B, T, H] in its input's type, RAW only
    d_decay,  # in: q_hat . dq_hat of `gradient_q_kernel`; out: the decay's gradient [B, T, H] fp32
    T, q_token, q_head, k_token, k_head,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BLOCKS: tl.constexpr,
    MODE: tl.constexpr, DECAYS: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # with a decay, or with erase and write given, dL/d ln e and dL/d ln w are needed apart
    PAIRS: tl.constexpr = DECAYS or MODE == RAW
    BOUNDED: tl.constexpr = MODE == GATED_EFLA and tl.bfloat16 == DTYPE
    STRONG: tl.constexpr = DECAYS and MODE != GATED_EFLA
    TRACE: tl.constexpr = BV >= 64  # narrower products of S and dS are not worth the tensor cores' other path
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        slot = m * H + h
        COLUMNS: tl.constexpr = 5 if DECAYS else 4
        row = table + slot * COLUMNS * CHUNK + rows
        at = (first + rows) * H + h
        inside = rows < left
        own = rows[:, None] == rows[None, :]

        lower = tl.zeros([CHUNK, CHUNK], tl.float32)  # dR_i.X_j
        upper = tl.zeros([CHUNK, CHUNK], tl.float32)  # dR_j.X_i
        for column0 in range(0, V, BV):
            X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            dR = load_rows(d_solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            lower += tl.dot(dR, tl.trans(X), input_precision=PRECISION)
            upper += tl.dot(X, tl.trans(dR), input_precision=PRECISION)
        if not PAIRS:
            s = tl.sum(tl.where(own, lower, 0.0), 1)
        e = tl.load(row)
        erase = e
        if MODE == RAW:  # D without e, by which nothing may be divided afterwards
            erase = tl.full([CHUNK], 1.0, tl.float32)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            b_end = tl.min(b, 0)
            lower = decay_pairs(lower, -erase, b, 0, BOUNDED)
            upper = decay_pairs(upper, -e, b, 1, BOUNDED)
            erase *= tl.exp(b)
        else:
            lower *= -erase[:, None]
            upper *= -e[None, :]
        lower = tl.where(rows[:, None] > rows[None, :], lower, 0.0)
        upper = tl.where(rows[:, None] < rows[None, :], upper, 0.0)
        if PAIRS:
            M = lower.to(DTYPE)
            Mt = upper.to(DTYPE)
            d_key = tl.zeros([CHUNK, BK], tl.float32)
            kept = tl.zeros([BV, BV] if TRACE else [BV], tl.float32)
            for column0 in range(0, V, BV):
                dR = load_rows(d_solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
                S = load_state(states + slot * K * V, K, V, BK, BV, column0)
                d_key += tl.dot(dR, tl.trans(S), input_precision=PRECISION)
                if DECAYS:
                    dS = load_state(d_states + slot * K * V, K, V, BK, BV, column0)
                    if TRACE:
                        kept += tl.dot(tl.trans(S), dS, input_precision=PRECISION)
                    else:
                        kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
            if DECAYS and TRACE:
                columns = tl.arange(0, BV)
                kept = tl.sum(tl.where(columns[:, None] == columns[None, :], kept, 0.0), 1)
            key = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
            wide = key.to(tl.float32)
            d_key *= -erase[:, None]
            d_key = tl.dot(M, key, d_key, input_precision=PRECISION)
            d_erase = tl.sum(d_key * wide, 1)
            k_erased = d_erase
            if MODE == RAW:
                d_key *= e[:, None]
                k_erased *= e
            if DECAYS:
                store = tl.exp(b_end - b)
            for column0 in range(0, V, BV):
                X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
                dS = load_state(d_states + slot * K * V, K, V, BK, BV, column0)
                if DECAYS:
                    X = (X.to(tl.float32) * store[:, None]).to(DTYPE)
                d_key += tl.dot(X, tl.trans(dS), input_precision=PRECISION)
            if DECAYS:
                from_write = tl.sum(d_key * wide, 1) - k_erased
            d_key = tl.dot(Mt, key, d_key, input_precision=PRECISION)
            N = tl.load(d_scores + slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])
            query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, DTYPE)
            if STRONG:
                others = tl.where(own, 0.0, N).to(DTYPE)
                d_key = tl.dot(tl.trans(others), query, d_key, input_precision=PRECISION)
            else:
                d_key = tl.dot(tl.trans(N), query, d_key, input_precision=PRECISION)
            if DECAYS:
                d_b = tl.load(d_decay + at, mask=inside, other=0.0) + 2.0 * k_erased - tl.sum(d_key * wide, 1)
                at_end = tl.sum(from_write, 0) + tl.exp(b_end) * tl.sum(kept, 0)
                d_log_decay = tl.sum(d_b, 0) - tl.cumsum(d_b, 0) + d_b + at_end
            if STRONG:
                alone = tl.where(own, N, 0.0).to(DTYPE)
                d_key = tl.dot(alone, query, d_key, input_precision=PRECISION)
        else:
            M = (lower + upper).to(DTYPE)
            key = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
            wide = key.to(tl.float32)
            d_key = tl.dot(M, key, input_precision=PRECISION)
            N = tl.load(d_scores + slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])
            query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, DTYPE)
            d_key += tl.dot(tl.trans(N), query, input_precision=PRECISION)
            for column0 in range(0, V, BV):
                X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
                dR = load_rows(d_solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
                S = load_state(states + slot * K * V, K, V, BK, BV, column0)
                dS = load_state(d_states + slot * K * V, K, V, BK, BV, column0)
                scaled = (dR.to(tl.float32) * -e[:, None]).to(DTYPE)
                d_key += tl.dot(scaled, tl.trans(S), input_precision=PRECISION)
                d_key += tl.dot(X, tl.trans(dS), input_precision=PRECISION)
        if PAIRS:
            d_w = tl.zeros([CHUNK], tl.float32)
            for block in tl.static_range(BLOCKS):
                d_w += tl.load(d_writes + at * BLOCKS + block, mask=inside, other=0.0)
        if MODE == RAW:
            tl.store(d_gate + at, d_erase, mask=inside)
            tl.store(d_write + at, d_w, mask=inside)
            if DECAYS:
                tl.store(d_decay + at, d_log_decay, mask=inside)
        else:
            logit = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
            log_g = tl.zeros([CHUNK], tl.float32)
            d_ld, s_e = log_g, log_g
            if DECAYS:
                log_g = tl.load(decay + at, mask=inside, other=0.0).to(tl.float32)
                d_ld = d_log_decay
                s_e = d_erase
                s_w = d_w * tl.load(row + CHUNK)
            else:
                s_w = s  # only s_e + s_w is used
            lam = tl.load(row + (COLUMNS - 1) * CHUNK)
            k_dk = tl.sum(d_key * wide, 1)
            d_logit, d_log_g, d_lam = coefficient_gradients(MODE, logit, log_g, lam, s_e, s_w, k_dk, d_ld)
            d_key += 2.0 * d_lam[:, None] * wide
            tl.store(d_gate + at, d_logit, mask=inside)
            if DECAYS:
                tl.store(d_decay + at, d_log_g, mask=inside)
        store_rows(dk + (first * H + h) * K, H * K, left, K, BK, 0, d_key)
