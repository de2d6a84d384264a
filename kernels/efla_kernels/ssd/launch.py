"""Launches of state-space duality's kernels: buffers, grids, the two passes over a split sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla_kernels.launch.arguments import Packing, pack, rows_in_place, use_descriptors
from efla_kernels.launch.dispatch import launch
from efla_kernels.ssd.choices import Problem
from efla_kernels.ssd.gates import ssd_gate_gradient_kernel, ssd_table_kernel
from efla_kernels.ssd.gradient_bc import ssd_gradient_bc_kernel
from efla_kernels.ssd.gradient_x import ssd_gradient_x_kernel
from efla_kernels.ssd.output import ssd_output_kernel
from efla_kernels.ssd.scan import ssd_merge_kernel, ssd_scan_kernel

MERGE_BLOCK = 1024


class Steps(NamedTuple):
    """What steps and decays are made of; None where they are given (`log_decay`) or not part of the call."""

    log_decay: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    D: Tensor | None
    dt_mask: Tensor | None


def _tma(p: Problem, x: Tensor, *keys: Tensor) -> bool:
    """Whether tensor descriptors can serve: bf16, heads of x side by side, N and P powers of two from 16 on."""
    whole = all(size >= 16 and not size & (size - 1) for size in (p.state_width, p.width))
    return p.dtype == torch.bfloat16 and whole and x.stride(2) == p.width and use_descriptors(x, *keys)


def _scan(
    p: Problem,
    x: Tensor,
    keys: Tensor,
    table: Tensor,
    outer: Tensor | None,
    packing: Packing,
    reverse: bool,
    left_over: Tensor | None,
    states: Tensor,
) -> None:
    """Both scans: states before (gradients after) each chunk; `outer` and `left_over` [sequences, H, N, P] fp32."""
    block, flags = p.choice.scan, p.flags
    segments, each = p.segments()
    tma = _tma(p, x, keys)
    width = p.scan_rows(tma)
    programs = p.sequences * segments * p.heads * -(-p.state_width // width)

    def scan(outer: Tensor | None, left_over: Tensor | None, totals: Tensor | None) -> None:
        unused = table
        launch(
            ssd_scan_kernel, programs,
            x, keys, table, unused if outer is None else outer, packing.cu_seqlens, packing.first_chunk, states,
            unused if left_over is None else left_over, unused if totals is None else totals, p.tokens, segments, each,
            x.stride(1), x.stride(2), keys.stride(1), keys.stride(2),
            BN=width, REVERSE=reverse, OUTER=outer is not None, LEFT_OVER=left_over is not None,
            STORE=totals is None, TMA=tma, STAGES=block.stages, num_warps=block.warps, **flags,
        )  # fmt: skip

    if segments > 1:
        local = torch.empty(p.state_shape(p.sequences, segments), device=x.device, dtype=torch.float32)
        totals = local.new_empty(p.sequences, segments, p.heads)
        scan(None, local, totals)
        carried = torch.empty_like(local)
        size = p.state_width * p.width
        launch(
            ssd_merge_kernel, p.sequences * p.heads * -(-size // MERGE_BLOCK),
            local, totals, local if outer is None else outer, carried, segments,
            H=p.heads, SIZE=size, BLOCK=MERGE_BLOCK, REVERSE=reverse, OUTER=outer is not None,
            num_warps=4,
        )  # fmt: skip
        outer = carried
    scan(outer, left_over, None)


def forward(
    p: Problem,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    steps: Steps,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, final states or empty, table, states before each chunk); the last two serve the backward pass."""
    choice = p.choice
    x, dt, B, C = rows_in_place(x), rows_in_place(dt.unsqueeze(-1)), rows_in_place(B), rows_in_place(C)
    unused = dt
    packing = pack(cu_seqlens, choice.chunk, p.chunks, unused)
    fp32: dict[str, Any] = {"device": x.device, "dtype": torch.float32}
    table = torch.empty(p.chunks, p.heads, 2, choice.chunk, **fp32)
    launch(
        ssd_table_kernel, _gate_programs(p),
        dt, *_parameters(steps, unused), *packing, table, p.tokens, dt.stride(1),
        dt.stride(2), **_gate_flags(p, steps),
    )  # fmt: skip
    states = torch.empty(p.state_shape(p.chunks), device=x.device, dtype=p.operand)
    final = torch.empty(p.state_shape(p.sequences) if output_final else (0,), **fp32)
    _scan(p, x, B, table, initial, packing, False, final if output_final else None, states)
    # packed rows that no segment covers stay zero
    y = (torch.zeros if p.packed else torch.empty)(x.shape, device=x.device, dtype=x.dtype)
    tma = _tma(p, x)
    each = p.heads_each(1, 2)
    launch(
        ssd_output_kernel, p.chunks * (p.heads // each),
        x, B, C, unused if steps.D is None else steps.D, table, states, *packing, y,
        p.tokens, each, x.stride(1), x.stride(2), B.stride(1), B.stride(2), C.stride(1), C.stride(2),
        SKIP=steps.D is not None, TMA=tma, **p.tile(p.output_block(tma)), **p.flags,
    )  # fmt: skip
    return y, final, table, states


def _gate_flags(p: Problem, steps: Steps) -> dict[str, Any]:
    return {
        "H": p.heads, "BH": p.gate_heads, "L": p.choice.chunk, "FUSED": steps.A_log is not None,
        "MASKED": steps.dt_mask is not None, "PACKED": p.packed, "num_warps": 4,
    }  # fmt: skip


def _gate_programs(p: Problem) -> int:
    return p.chunks * -(-p.heads // p.gate_heads)


def _parameters(steps: Steps, unused: Tensor) -> list[Tensor]:
    """What the gates' kernels read beside dt; anything for what is not part of the call."""
    log_decay, mask = (None if t is None else t.contiguous() for t in (steps.log_decay, steps.dt_mask))
    return [unused if t is None else t for t in (log_decay, steps.A_log, steps.dt_bias, mask)]


class Gradients(NamedTuple):
    """Gradients of the op's inputs; empty tensors where there is no such input."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    log_decay: Tensor
    parameters: Tensor  # A_log, dt_bias [2, H]
    D: Tensor
    initial: Tensor


def backward(
    p: Problem,
    table: Tensor,
    states: Tensor,
    dy: Tensor,
    d_final: Tensor | None,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    steps: Steps,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Gradients:
    """Gradients of all inputs from dy [B, T, H, P] and the final states' gradient; empty `states` are scanned again."""
    d_final = None if d_final is None else d_final.contiguous()
    choice, L = p.choice, p.choice.chunk
    x, dt, B, C = rows_in_place(x), rows_in_place(dt.unsqueeze(-1)), rows_in_place(B), rows_in_place(C)
    dy = dy.contiguous()
    unused = dt
    packing = pack(cu_seqlens, choice.chunk, p.chunks, unused)
    fp32: dict[str, Any] = {"device": x.device, "dtype": torch.float32}
    make = torch.zeros if p.packed else torch.empty
    if not states.numel():
        states = torch.empty(p.state_shape(p.chunks), device=x.device, dtype=p.operand)
        _scan(p, x, B, table, initial, packing, False, None, states)
    need_initial = initial is not None
    d_states = torch.empty_like(states)
    d_initial = torch.empty(p.state_shape(p.sequences) if need_initial else (0,), **fp32)
    _scan(p, dy, C, table, d_final, packing, True, d_initial if need_initial else None, d_states)

    strides = (x.stride(1), x.stride(2), B.stride(1), B.stride(2), C.stride(1), C.stride(2))
    block = choice.gradient_x
    blocks = L // block.rows
    places = 3 if blocks == 2 else 1
    each = p.heads_each(places)
    skip = steps.D is not None
    dx = make(x.shape, device=x.device, dtype=x.dtype)
    pairs = torch.empty(p.chunks, p.heads // each, L, L, **fp32)
    sizes = (p.chunks, p.heads, L)
    z_own, z_columns, z_rows, z_full, writes, reads = (torch.empty(sizes, **fp32) for _ in range(6))
    d_skip = make((p.chunks, p.heads, blocks) if skip else (0,), **fp32)
    launch(
        ssd_gradient_x_kernel, p.chunks * places * (p.heads // each),
        x, B, C, unused if steps.D is None else steps.D, dy, table, d_states, *packing, dx, pairs, z_own, z_columns,
        z_rows, z_full, writes, d_skip, p.tokens, each, *strides, SKIP=skip, TMA=_tma(p, x), **p.tile(block),
        **p.flags,
    )  # fmt: skip

    pair_parts = p.heads // each
    block = choice.gradient_bc
    blocks = L // block.rows
    each = p.heads_each(2 * blocks, 2)  # all of a group's heads are best: parts are added up by another kernel
    parts = p.heads // p.groups // each
    whole: dict[str, Any] = {"device": x.device, "dtype": B.dtype if parts == 1 else torch.float32}
    dB, dC = make(parts, *B.shape, **whole), make(parts, *C.shape, **whole)
    kept = torch.empty(p.chunks, p.heads, blocks, **fp32)
    launch(
        ssd_gradient_bc_kernel, p.chunks * 2 * blocks * (p.heads // each),
        x, B, C, dy, table, states, d_states, pairs, *packing, dB, dC, reads, kept, p.tokens, each, pair_parts,
        B.numel(), *strides, TMA=_tma(p, x), **p.tile(block), **p.flags,
    )  # fmt: skip

    fused = steps.A_log is not None
    shape = dt.shape[:3]
    d_dt = make(shape, device=x.device, dtype=dt.dtype)
    d_decay = make((0,) if fused else shape, **fp32)
    sums = make((p.chunks, 2, p.heads) if fused else (0, 2, 0), **fp32)
    launch(
        ssd_gate_gradient_kernel, _gate_programs(p),
        dt, *_parameters(steps, unused), table, z_own, z_columns, z_rows, z_full, reads, writes, kept, *packing,
        d_dt, d_decay, sums, p.tokens, dt.stride(1), dt.stride(2), R=choice.gradient_x.rows, KEPT_BLOCKS=blocks,
        **_gate_flags(p, steps),
    )  # fmt: skip
    d_D = d_skip.sum((0, 2)) if skip else d_skip
    dB, dC = (d[0] if parts == 1 else d.sum(0).to(B.dtype) for d in (dB, dC))
    return Gradients(dx, d_dt, dB, dC, d_decay, sums.sum(0), d_D, d_initial)
