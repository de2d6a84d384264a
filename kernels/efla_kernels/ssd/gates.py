"""State-space duality, first and last kernel, parallel over chunks and heads: steps and decays, and their gradients.

    dt = mask softplus(dt_raw + dt_bias)      a = -exp(A_log) dt      b_i = a_1 + ... + a_i within the chunk

or dt and a as they were given. The table holds dt and b / ln 2 (all decays are then powers of two, the exponential that
the hardware has). Backward, with z_ij = Gamma_ij (C_i . B_j) (dy_i . x_j) summed over i or j by `ssd_gradient_x_kernel`
and the products with the states by `ssd_gradient_bc_kernel`:

    d dt_j  = sum_i z_ij + exp(b_L - b_j) x_j . (dS^T B_j)                                (a held fixed)
    d a_t   = sum_{i>=t} [ sum_{j<i} z_ij dt_j - dt_i sum_{j>i} z_ji + exp(b_i) dy_i . (S^T C_i) ]
              + sum_{j<t} dt_j exp(b_L - b_j) x_j . (dS^T B_j) + exp(b_L) <S, dS>

The pairs' row and column sums come from the same z_ij, so that what cancels between them cancels up to fp32's rounding.
Below the least decay that is told from 0, a's gradient is 0, as the cut's own derivative is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.delta_rule.gates import LOWEST_LOG_DECAY
from efla_kernels.launch.tiles import chunk_span

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to fp32's last digits at both ends: log(1 + z) = 2 artanh(z / (2 + z)) as a series."""
    z = tl.exp(-tl.abs(x))
    s = z / (2.0 + z)  # at most 1/3
    y = s * s
    series = 1.0 / 9 + y * (1.0 / 11 + y * (1.0 / 13 + y * (1.0 / 15)))
    series = 1.0 + y * (1.0 / 3 + y * (1.0 / 5 + y * (1.0 / 7 + y * series)))
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def rate(A_log, heads, inside):
    """-exp(A_log), the decay's logarithm per unit of dt."""
    return -tl.exp(tl.load(A_log + heads, mask=inside, other=0.0).to(tl.float32))


@triton.jit
def steps(dt, dt_bias, dt_mask, at, token, heads, inside, real, FUSED: tl.constexpr, MASKED: tl.constexpr):
    """(dt, d dt / d dt_raw) of a tile of tokens and heads, zeros outside of it."""
    raw = tl.load(dt + at, mask=inside, other=0.0).to(tl.float32)
    slope = tl.full(raw.shape, 1.0, tl.float32)
    if FUSED:
        raw += tl.load(dt_bias + heads, mask=real, other=0.0).to(tl.float32)[None, :]
        slope = tl.sigmoid(raw)
        raw = softplus(raw)
    if MASKED:
        kept = tl.load(dt_mask + token, mask=token >= 0, other=0.0).to(tl.float32)[:, None]
        raw *= kept
        slope *= kept
    return tl.where(inside, raw, 0.0), slope


@triton.jit(do_not_specialize=["T"])
def ssd_table_kernel(
    dt,  # [B, T, H]
    log_decay,  # [B, T, H]; not FUSED
    A_log,  # [H]; FUSED
    dt_bias,  # [H]; FUSED
    dt_mask,  # [B, T]; MASKED
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    table,  # out [chunks, H, 2, L] fp32: dt, b / ln 2
    T,
    dt_token,
    dt_head,
    H: tl.constexpr,
    BH: tl.constexpr,
    L: tl.constexpr,
    FUSED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):
    blocks: tl.constexpr = (H + BH - 1) // BH
    m = (tl.program_id(0) // blocks).to(tl.int64)
    heads = tl.program_id(0) % blocks * BH + tl.arange(0, BH)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED, L)
    if used:
        rows = tl.arange(0, L)
        real = heads < H
        inside = (rows[:, None] < left) & real[None, :]
        at = (first + rows)[:, None] * dt_token + heads[None, :] * dt_head
        token = tl.where(rows < left, first + rows, -1)
        step, _ = steps(dt, dt_bias, dt_mask, at, token, heads, inside, real, FUSED, MASKED)
        if FUSED:
            decay = rate(A_log, heads, real)[None, :] * step
        else:
            at = (first + rows)[:, None] * H + heads[None, :]
            decay = tl.load(log_decay + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.cumsum(tl.maximum(decay, LOWEST_LOG_DECAY), 0) * LOG2_E
        out = table + (m * H + heads)[None, :] * 2 * L + rows[:, None]
        tl.store(out, step, mask=real[None, :])
        tl.store(out + L, b, mask=real[None, :])


@triton.jit(do_not_specialize=["T"])
def ssd_gate_gradient_kernel(
    dt,
    log_decay,
    A_log,
    dt_bias,
    dt_mask,
    table,
    z_own,  # [chunks, H, L]: z_jj
    z_columns,  # [chunks, H, L]: sum_i z_ij, i > j, over the triangles of pairs
    z_rows,  # [chunks, H, L]: sum_j z_ij dt_j over the triangles
    z_full,  # [chunks, H, L]: over the full tile, sum_i z_ij of the first block, sum_j z_ij dt_j of the second
    reads,  # [chunks, H, L]: exp(b_i) dy_i . (S^T C_i)
    writes,  # [chunks, H, L]: exp(b_L - b_j) x_j . (dS^T B_j)
    kept,  # [chunks, H, KEPT_BLOCKS]: exp(b_L) <S, dS>, by blocks of the state's rows
    cu_seqlens,
    first_chunk,
    chunk_sequence,
    d_dt,  # out [B, T, H]: FUSED d dt_raw
    d_decay,  # out [B, T, H] fp32: d log_decay; not FUSED
    sums,  # out [chunks, 2, H] fp32: d A_log, d dt_bias of the chunk; FUSED
    T,
    dt_token,
    dt_head,
    H: tl.constexpr,
    BH: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,  # rows of a block of pairs
    KEPT_BLOCKS: tl.constexpr,
    FUSED: tl.constexpr,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
):
    blocks: tl.constexpr = (H + BH - 1) // BH
    m = (tl.program_id(0) // blocks).to(tl.int64)
    heads = tl.program_id(0) % blocks * BH + tl.arange(0, BH)
    first, left, used = chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED, L)
    if used:
        rows = tl.arange(0, L)
        real = heads < H
        wide = real[None, :] & (rows[:, None] < L)
        inside = (rows[:, None] < left) & real[None, :]
        slot = m * H + heads
        tile = slot[None, :] * L + rows[:, None]
        step = tl.load(table + tile + slot[None, :] * L, mask=wide, other=0.0)
        columns = tl.load(z_columns + tile, mask=wide, other=0.0)
        written = tl.load(writes + tile, mask=wide, other=0.0)
        z_row = tl.load(z_rows + tile, mask=wide, other=0.0)
        if L > R:
            full = tl.load(z_full + tile, mask=wide, other=0.0)
            columns += tl.where(rows[:, None] < R, full, 0.0)
            z_row += tl.where(rows[:, None] < R, 0.0, full)
        d_b = z_row - step * columns + tl.load(reads + tile, mask=wide, other=0.0)
        at_end = tl.zeros([BH], tl.float32)
        for block in tl.static_range(KEPT_BLOCKS):
            at_end += tl.load(kept + slot * KEPT_BLOCKS + block, mask=real, other=0.0)
        before = step * written
        d_a = tl.cumsum(d_b, 0, reverse=True) + (tl.cumsum(before, 0) - before) + at_end[None, :]
        d_step = columns + written + tl.load(z_own + tile, mask=wide, other=0.0)
        at = (first + rows)[:, None] * dt_token + heads[None, :] * dt_head
        out = (first + rows)[:, None] * H + heads[None, :]
        if FUSED:
            token = tl.where(rows < left, first + rows, -1)
            _, slope = steps(dt, dt_bias, dt_mask, at, token, heads, inside, real, FUSED, MASKED)
            per_step = rate(A_log, heads, real)[None, :]
            d_a = tl.where(per_step * step > LOWEST_LOG_DECAY, d_a, 0.0)
            d_raw = tl.where(inside, (d_step + per_step * d_a) * slope, 0.0)
            tl.store(d_dt + out, d_raw.to(d_dt.dtype.element_ty), mask=inside)
            d_A_log = tl.sum(tl.where(inside, d_a * per_step * step, 0.0), 0)
            tl.store(sums + m * 2 * H + heads, d_A_log, mask=real)
            tl.store(sums + (m * 2 + 1) * H + heads, tl.sum(d_raw, 0), mask=real)
        else:
            tl.store(d_dt + out, d_step.to(d_dt.dtype.element_ty), mask=inside)
            decay = tl.load(log_decay + out, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_decay + out, tl.where(decay > LOWEST_LOG_DECAY, d_a, 0.0), mask=inside)
