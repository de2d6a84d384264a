"""Kernel 5, parallel over chunks: the gradients of k and of the gates.

With S the state before the chunk, dS the gradient after it, Gamma_ij = exp(b_i - b_j), X and dR of the scans, and r N
of `gradient_q_kernel`:

    M = -e stril(dR X^T) * Gamma
    dK = (M + M^T) K + (r N)^T Q + exp(b_C - b) X dS^T - e exp(b) dR S^T
    s  = rowsum(dR * X) = dL/d ln e + dL/d ln w

The decay's gradient needs the pairs Z_ij = M_ij k_i.k_j one by one: d b_i = sum_j Z_ij - sum_j Z_ji + terms with the
states, summed back from the chunk's end. (The shortcut dO.O - dV.V has the same value in exact arithmetic, and loses it
to cancellation.) M^T is formed as X dR^T, not by transposing M: the products C x C come first and leave only operands
behind, so that their registers are free when the products C x K follow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.triton.gates import RAW, coefficient_gradients
from efla_kernels.triton.tiles import CHUNK, chunk_span, load_rows, load_state, store_rows


@triton.jit
def gradient_k_kernel(
    q,
    k,
    v,
    gate,
    decay,
    d_scores,
    table,
    states,
    solved,
    d_states,
    d_solved,
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    dk,  # out [B, T, H, K]
    d_gate,  # out [B, T, H] fp32: d logit; RAW: d erase
    d_write,  # out [B, T, H] fp32, RAW only
    d_decay,  # in: log_decay's gradient from `gradient_q_kernel`; out: the decay's gradient [B, T, H] fp32
    T,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
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
    # with a decay, or with erase and write given, dL/d ln e and dL/d ln w are needed apart
    PAIRS: tl.constexpr = DECAYS or MODE == RAW
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        slot = m * H + h
        COLUMNS: tl.constexpr = 4 if DECAYS else 3
        row = table + slot * COLUMNS * CHUNK + rows
        at = (first + rows) * H + h
        inside = rows < left
        above = rows[:, None] < rows[None, :]
        below = rows[:, None] > rows[None, :]
        e = tl.load(row)

        lower = tl.zeros([CHUNK, CHUNK], tl.float32)  # dR_i.X_j
        upper = tl.zeros([CHUNK, CHUNK], tl.float32)  # dR_j.X_i
        s = tl.zeros([CHUNK], tl.float32)
        for column0 in range(0, V, BV):
            X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            dR = load_rows(d_solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            lower += tl.dot(dR, tl.trans(X), input_precision=PRECISION)
            upper += tl.dot(X, tl.trans(dR), input_precision=PRECISION)
            if PAIRS:
                value = load_rows(v + first * v_token + h * v_head, v_token, left, V, BV, column0, tl.float32)
                s += tl.sum(dR.to(tl.float32) * value, 1)
            else:
                s += tl.sum(dR.to(tl.float32) * X.to(tl.float32), 1)
        lower = tl.where(below, lower, 0.0)
        upper = tl.where(above, upper, 0.0)
        if DECAYS:
            b = tl.load(row + 3 * CHUNK)
            b_end = tl.min(b, 0)
            lower *= tl.exp(tl.where(below, b[:, None] - b[None, :], 0.0))
            upper *= tl.exp(tl.where(above, b[None, :] - b[:, None], 0.0))
        M = (-(lower * e[:, None] + upper * e[None, :])).to(DTYPE)
        key = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
        if PAIRS:
            Z = -lower * tl.dot(key, tl.trans(key), input_precision=PRECISION)
            d_erase = tl.sum(Z, 1)
            if DECAYS:
                Z *= e[:, None]
                d_b = tl.sum(Z, 1) - tl.sum(Z, 0)
        d_key = tl.dot(M, key, input_precision=PRECISION)
        N = tl.load(d_scores + slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :])
        query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, DTYPE)
        d_key += tl.dot(tl.trans(N), query, input_precision=PRECISION)

        erase = e
        if DECAYS:
            erase = e * tl.exp(b)
            store = tl.exp(b_end - b)
            from_write = tl.zeros([CHUNK], tl.float32)
            kept = tl.zeros([BV], tl.float32)
        inter = tl.zeros([CHUNK], tl.float32)
        for column0 in range(0, V, BV):
            X = load_rows(solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            dR = load_rows(d_solved + slot * CHUNK * V, V, CHUNK, V, BV, column0, DTYPE)
            S = load_state(states + slot * K * V, K, V, BK, BV, column0)
            dS = load_state(d_states + slot * K * V, K, V, BK, BV, column0)
            if PAIRS:
                inter -= tl.sum(dR.to(tl.float32) * tl.dot(key, S, input_precision=PRECISION), 1)
            if DECAYS:
                kept += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 0)
                X = (X.to(tl.float32) * store[:, None]).to(DTYPE)
                from_write += tl.sum(X.to(tl.float32) * tl.dot(key, dS, input_precision=PRECISION), 1)
            scaled = (dR.to(tl.float32) * -erase[:, None]).to(DTYPE)
            d_key += tl.dot(scaled, tl.trans(S), input_precision=PRECISION)
            d_key += tl.dot(X, tl.trans(dS), input_precision=PRECISION)
        if PAIRS:
            if DECAYS:
                inter *= tl.exp(b)
                d_b += e * inter - from_write
                at_end = tl.sum(from_write, 0) + tl.exp(b_end) * tl.sum(kept, 0)
                d_log_decay = tl.sum(d_b, 0) - tl.cumsum(d_b, 0) + d_b + at_end
                d_log_decay += tl.load(d_decay + at, mask=inside, other=0.0)
            d_erase += inter
        wide = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, tl.float32)
        if MODE == RAW:
            tl.store(d_gate + at, d_erase, mask=inside)
            tl.store(d_write + at, s, mask=inside)
            if DECAYS:
                tl.store(d_decay + at, d_log_decay, mask=inside)
        else:
            logit = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
            log_g = tl.zeros([CHUNK], tl.float32)
            d_ld = log_g
            s_e = log_g  # without a decay only s_e + s_w is used, and that is s
            if DECAYS:
                log_g = tl.load(decay + at, mask=inside, other=0.0).to(tl.float32)
                d_ld = d_log_decay
                s_e = e * d_erase
                s *= tl.load(row + CHUNK)
            lam = tl.sum(wide * wide, 1)
            k_dk = tl.sum(d_key * wide, 1)
            d_logit, d_log_g, d_lam = coefficient_gradients(MODE, logit, log_g, lam, s_e, s, k_dk, d_ld)
            d_key += 2.0 * d_lam[:, None] * wide
            tl.store(d_gate + at, d_logit, mask=inside)
            if DECAYS:
                tl.store(d_decay + at, d_log_g, mask=inside)
        store_rows(dk + (first * H + h) * K, H * K, left, K, BK, 0, d_key)
