"""Kernels 4 and 5 in one, parallel over chunks: the gradients of q, k and the gate where there is no decay.

The algebra of `gradient_q_kernel` and `gradient_k_kernel`, with every tile read from memory once. With S the state
before the chunk, dS the gradient after it, X and dR of the scans, L the part below the diagonal:

    N = tril(dO X^T)             dq_hat = dO S^T + (r N) K
    M = -e L(dR X^T)             dK = X dS^T - e dR S^T + M K + M^T K + (r N)^T Q         rowsum(dR * X) = dL/d ln a

It takes all of V at once: in a loop over blocks of V four sums would be held at a time, two of them C x K, which no
thread has the registers for. Here q's gradient is done before k's begins. What that costs is that nothing is pipelined:
each load is waited for, so that other programs of the multiprocessor must have work meanwhile. Hence no more than 64 KB
of tiles at a time, k read twice (thrice with its own term) and q twice, from L2, where `ask` has everything brought a
while before it is needed. Four warps: eight would each compute all 64 rows' products, which Triton's layout of
products that feed one another does not divide among more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.triton.gates import coefficient_gradients
from efla_kernels.triton.interpreter import INTERPRETED
from efla_kernels.triton.tiles import CHUNK, chunk_span, load_rows, store_rows


@triton.jit
def ask_for_rows(base, stride, left, WIDTH: tl.constexpr):
    """Have CHUNK rows of 16-bit numbers (the first `left` of them) brought into L2, in lines of 128 bytes."""
    if not INTERPRETED:
        rows = tl.minimum(tl.arange(0, CHUNK), left - 1)
        lines = tl.arange(0, WIDTH // 64) * 64
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [base + rows[:, None] * stride + lines[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def ask_for_block(base, BYTES: tl.constexpr):
    """Have BYTES bytes in a row brought into L2: one instruction of one thread."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
            " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r",
            [base, tl.full((), BYTES, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def token_rows(x, first, left, token, h, head, WIDTH: tl.constexpr, DTYPE: tl.constexpr, TMA: tl.constexpr):
    """A head's rows of the chunk, of q, k or dO: [CHUNK, WIDTH]."""
    if TMA:
        return x.load([first.to(tl.int32), h * head])
    else:
        return load_rows(x + first * token + h * head, token, left, WIDTH, WIDTH, 0, DTYPE)


@triton.jit
def slot_rows(x, slot, ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Chunk data [ROWS, WIDTH] of a slot: X, dR, S or dS."""
    if TMA:
        return x.load([(slot * ROWS).to(tl.int32), 0])
    else:
        return load_rows(x + slot * ROWS * WIDTH, WIDTH, ROWS, WIDTH, WIDTH, 0, x.dtype.element_ty, ROWS)


@triton.jit
def gradient_kernel(
    q,
    k,
    do,
    gate,
    table,
    states,
    solved,
    d_states,
    d_solved,
    q_tiles,  # these seven again as descriptors of tiles, or (not TMA) again
    k_tiles,
    do_tiles,
    state_tiles,
    solved_tiles,
    d_state_tiles,
    d_solved_tiles,
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    dq,  # out [B, T, H, K]
    dk,  # out [B, T, H, K]
    d_gate,  # out [B, T, H] in the gate's type: d logit
    T,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    MODE: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,  # descriptors, for chunks that are all full: they would read on in the next sequence
):
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        slot = m * H + h
        row = table + slot * 4 * CHUNK + rows
        at = (first + rows) * H + h
        inside = rows < left

        ask_for_block(solved + slot * CHUNK * V, CHUNK * V * 2)
        ask_for_block(states + slot * K * V, K * V * 2)
        ask_for_rows(k + first * k_token + h * k_head, k_token, left, K)
        d_out = token_rows(do_tiles, first, left, H * V, h, V, V, DTYPE, TMA)
        X = slot_rows(solved_tiles, slot, CHUNK, V, TMA)
        ask_for_rows(q + first * q_token + h * q_head, q_token, left, K)
        ask_for_block(d_solved + slot * CHUNK * V, CHUNK * V * 2)
        N = tl.dot(d_out, tl.trans(X), input_precision=PRECISION)
        S = slot_rows(state_tiles, slot, K, V, TMA)
        d_query = tl.dot(d_out, tl.trans(S), input_precision=PRECISION)
        r = tl.load(row + 2 * CHUNK)
        N = tl.where(rows[:, None] >= rows[None, :], N * r[:, None], 0.0).to(DTYPE)
        key = token_rows(k_tiles, first, left, k_token, h, k_head, K, DTYPE, TMA)
        ask_for_block(d_states + slot * K * V, K * V * 2)
        d_query = tl.dot(N, key, d_query * r[:, None], input_precision=PRECISION)
        wide = load_rows(q + first * q_token + h * q_head, q_token, left, K, K, 0, tl.float32)
        # q_hat = r q with r = scale / sqrt(|q|^2 + eps): r (d - q (q.d) r^2 / scale^2)
        along = tl.sum(d_query * wide, 1)
        d_query -= wide * (along * (r * r) / (scale * scale))[:, None]
        store_rows(dq + (first * H + h) * K, H * K, left, K, K, 0, d_query)

        dR = slot_rows(d_solved_tiles, slot, CHUNK, V, TMA)
        e = tl.load(row)
        M = tl.dot(dR, tl.trans(X), input_precision=PRECISION)
        d_key = tl.dot(dR, tl.trans(S), input_precision=PRECISION)
        dS = slot_rows(d_state_tiles, slot, K, V, TMA)
        d_key = tl.dot(X, tl.trans(dS), d_key * -e[:, None], input_precision=PRECISION)
        s = tl.sum(tl.where(rows[:, None] == rows[None, :], M, 0.0), 1)
        M = tl.where(rows[:, None] > rows[None, :], M * -e[:, None], 0.0).to(DTYPE)
        key = token_rows(k_tiles, first, left, k_token, h, k_head, K, DTYPE, TMA)
        d_key = tl.dot(M, key, d_key, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(M), key, d_key, input_precision=PRECISION)
        query = token_rows(q_tiles, first, left, q_token, h, q_head, K, DTYPE, TMA)
        d_key = tl.dot(tl.trans(N), query, d_key, input_precision=PRECISION)

        # k once more: held since its products it would take a quarter of the registers
        wide = load_rows(k + first * k_token + h * k_head, k_token, left, K, K, 0, tl.float32)
        logit = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        none = tl.zeros([CHUNK], tl.float32)
        lam = tl.load(row + 3 * CHUNK)
        k_dk = tl.sum(d_key * wide, 1)
        d_logit, _, d_lam = coefficient_gradients(MODE, logit, none, lam, none, s, k_dk, none)
        d_key += 2.0 * d_lam[:, None] * wide
        tl.store(d_gate + at, d_logit, mask=inside)
        store_rows(dk + (first * H + h) * K, H * K, left, K, K, 0, d_key)
