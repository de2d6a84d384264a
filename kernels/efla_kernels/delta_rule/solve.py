"""Kernel 1, parallel over chunks: how the tokens of a chunk act on each other, which needs no state.

    A_ij = e_i exp(b_i - b_j) k_i . k_j for j < i, else 0        T = (I + A)^{-1}
    P_ij = r_i exp(b_i - b_j) q_i . k_j for j <= i, else 0       r = scale / sqrt(|q|^2 + 1e-6); RAW: r = scale

b is log_decay summed from the chunk's start. Reads q, k and the gates; writes T and P in the operand type and the rows
e, w, r (and b), |k|^2 of the table in fp32. The serial kernels then need q and k as operands only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.delta_rule.gates import GATED_EFLA, LOWEST_LOG_DECAY, NORM_EPS, RAW, coefficients, decay_pairs
from efla_kernels.launch.tiles import CHUNK, chunk_span, load_rows

BLOCK = tl.constexpr(16)  # of the diagonal, inverted by substitution; larger blocks are merged from these
BLOCKS = tl.constexpr(4)


@triton.jit
def _diagonal_blocks(A):
    """A [C, C] -> its diagonal blocks [4, 16, 16]."""
    own = tl.arange(0, CHUNK)[:, None] // BLOCK == tl.arange(0, BLOCKS)[None, :]
    packed = tl.sum(tl.where(own[:, :, None], tl.reshape(A, (CHUNK, BLOCKS, BLOCK)), 0.0), 1)
    return tl.reshape(packed, (BLOCKS, BLOCK, BLOCK))


@triton.jit
def _block_diagonal(D):
    """[4, 16, 16] -> the matrix [C, C] with these blocks on its diagonal."""
    own = tl.arange(0, CHUNK)[:, None] // BLOCK == tl.arange(0, BLOCKS)[None, :]
    rows = tl.reshape(D, (CHUNK, 1, BLOCK))
    return tl.reshape(tl.where(own[:, :, None], rows, 0.0), (CHUNK, CHUNK))


@triton.jit
def _merge(D, A, size: tl.constexpr, precision: tl.constexpr):
    """Inverse blocks of `size` on D's diagonal -> of 2 size: the lower left part is -T22 A21 T11."""
    rows = tl.arange(0, CHUNK)[:, None] // size
    columns = tl.arange(0, CHUNK)[None, :] // size
    A21 = tl.where((rows % 2 == 1) & (columns + 1 == rows), A, 0.0)
    half = tl.dot(A21, D, input_precision=precision)
    return D - tl.dot(D, half, input_precision=precision)


@triton.jit
def invert_unit_lower(A, precision: tl.constexpr):
    """(I + A)^{-1} for strictly lower A [C, C] in fp32: column by column inside blocks of 16, then two merges.

    T = I - T A gives column c of N = T - I from the ones behind it, N_c = -A_c - sum_j N_j A_jc. Columns, from the last
    one, and not rows from the first: a thread holds twice as much of a row as of a column, and the sums over j need a
    third of the exchanges. Substitution is stable whatever the keys' norms; a Neumann series is not (near-duplicate
    keys give entries near 1 whose powers cancel).
    """
    N = -_diagonal_blocks(A)
    columns = tl.arange(0, BLOCK)[None, None, :]
    for step in tl.static_range(1, 16):
        column = tl.sum(tl.where(columns == 15 - step, N, 0.0), 2)
        column += tl.sum(N * column[:, None, :], 2)
        N = tl.where(columns == 15 - step, column[:, :, None], N)
    identity = tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :]
    D = _block_diagonal(N) + tl.where(identity, 1.0, 0.0)
    D = _merge(D, A, 16, precision)
    return _merge(D, A, 32, precision)


@triton.jit
def solve_kernel(
    q, k,
    gate,  # beta's logit [B, T, H]; RAW: erase
    write,  # RAW only
    decay,  # log_g [B, T, H]; RAW: log_decay
    cu_seqlens, first_chunk, chunk_sequence,
    inverse,  # out [chunks, H, C, C]
    scores,  # out P [chunks, H, C, C]
    table,  # out [chunks, H, 4 or 5, C]: e, w, r, with a decay b, |k|^2 (not RAW)
    T, scale, q_token, q_head, k_token, k_head,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, MODE: tl.constexpr, DECAYS: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    m = (tl.program_id(0) // H).to(tl.int64)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED)
    if used:
        rows = tl.arange(0, CHUNK)
        inside = rows < left
        key = load_rows(k + first * k_token + h * k_head, k_token, left, K, BK, 0, DTYPE)
        A = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        at = (first + rows) * H + h
        log_decay = tl.zeros([CHUNK], tl.float32)
        if DECAYS:
            log_decay = tl.load(decay + at, mask=inside, other=0.0).to(tl.float32)
        e = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        if MODE == RAW:
            w = tl.load(write + at, mask=inside, other=0.0).to(tl.float32)
        else:
            lam = tl.sum(tl.where(rows[:, None] == rows[None, :], A, 0.0), 1)  # |k|^2, where few threads share a row
            e, w, log_decay = coefficients(MODE, e, log_decay, lam)
            e = tl.where(inside, e, 0.0)
            w = tl.where(inside, w, 0.0)
        slot = m * H + h
        COLUMNS: tl.constexpr = 5 if DECAYS else 4
        out = table + slot * COLUMNS * CHUNK + rows
        tl.store(out, e)
        tl.store(out + CHUNK, w)
        if MODE != RAW:
            tl.store(out + (COLUMNS - 1) * CHUNK, lam)
        below = rows[:, None] > rows[None, :]
        causal = rows[:, None] >= rows[None, :]
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        query = load_rows(q + first * q_token + h * q_head, q_token, left, K, BK, 0, DTYPE)
        P = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        r = tl.zeros([CHUNK], tl.float32) + scale
        if MODE != RAW:
            wide = query.to(tl.float32)
            r = scale * tl.rsqrt(tl.sum(wide * wide, 1) + NORM_EPS)
        tl.store(out + 2 * CHUNK, r)
        if DECAYS:
            BOUNDED: tl.constexpr = MODE == GATED_EFLA and tl.bfloat16 == DTYPE
            b = tl.cumsum(tl.maximum(log_decay, LOWEST_LOG_DECAY), 0)
            tl.store(out + 3 * CHUNK, b)
            A = decay_pairs(A, e, b, 0, BOUNDED)
            P = decay_pairs(P, r, b, 0, BOUNDED)
        else:
            A *= e[:, None]
            P *= r[:, None]
        tl.store(scores + tile, tl.where(causal, P, 0.0).to(DTYPE))
        A = tl.where(below, A, 0.0)
        tl.store(inverse + tile, invert_unit_lower(A, PRECISION).to(DTYPE))
