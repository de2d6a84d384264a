"""Launches of state-space duality's kernels: buffers, grids, the two passes over a split sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla_kernels.launch.arguments import Packing, pack, rows_in_place, use_descriptors
from efla_kernels.launch.dispatch import launch
from efla_kernels.ssd.buffers import Gradients, Inputs, Kept, OutputGradients, Outputs, allocate_outputs
from efla_kernels.ssd.choices import Problem
from efla_kernels.ssd.gates import ssd_gate_gradient_kernel, ssd_table_kernel
from efla_kernels.ssd.gradient_bc import ssd_gradient_bc_kernel
from efla_kernels.ssd.gradient_x import ssd_gradient_x_kernel
from efla_kernels.ssd.output import ssd_output_kernel
from efla_kernels.ssd.scan import ssd_merge_kernel, ssd_scan_kernel

MERGE_BLOCK = 1024


class Rows(NamedTuple):
    """The inputs as the kernels read them. `dt` stands in for tensors that a launch does not read."""

    x: Tensor
    dt: Tensor  # [batch, T, H, 1]
    B: Tensor
    C: Tensor
    D: Tensor
    gates: tuple[Tensor, Tensor, Tensor, Tensor]  # log_decay, A_log, dt_bias, dt_mask
    packing: Packing
    strides: tuple[int, ...]  # of x, B, C: token, head


def _rows(p: Problem, i: Inputs) -> Rows:
    x, dt, B, C = rows_in_place(i.x), rows_in_place(i.dt.unsqueeze(-1)), rows_in_place(i.B), rows_in_place(i.C)
    log_decay, mask = (None if t is None else t.contiguous() for t in (i.log_decay, i.dt_mask))
    gates = tuple(dt if t is None else t for t in (log_decay, i.A_log, i.dt_bias, mask))
    return Rows(
        x, dt, B, C, dt if i.D is None else i.D, gates,  # type: ignore[arg-type]
        pack(i.cu_seqlens, p.choice.chunk, p.chunks, dt),
        (x.stride(1), x.stride(2), B.stride(1), B.stride(2), C.stride(1), C.stride(2)),
    )  # fmt: skip


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


def forward(p: Problem, i: Inputs) -> Outputs:
    """Outputs, final states and what the backward pass needs."""
    rows, out = _rows(p, i), allocate_outputs(p, i)
    launch(
        ssd_table_kernel, _gate_programs(p),
        rows.dt, *rows.gates, *rows.packing, out.table, p.tokens, rows.dt.stride(1), rows.dt.stride(2),
        **_gate_flags(p, i),
    )  # fmt: skip
    states = out.states if i.keep_states else _new_states(p, rows.x)  # the outputs need them either way
    _scan(p, rows.x, rows.B, out.table, i.initial, rows.packing, False, out.final if i.output_final else None, states)
    tma = _tma(p, rows.x)
    each = p.heads_each(1, 2)
    launch(
        ssd_output_kernel, p.chunks * (p.heads // each),
        rows.x, rows.B, rows.C, rows.D, out.table, states, *rows.packing, out.y, p.tokens, each, *rows.strides,
        SKIP=i.D is not None, TMA=tma, **p.tile(p.output_block(tma)), **p.flags,
    )  # fmt: skip
    return out


def _new_states(p: Problem, x: Tensor) -> Tensor:
    return torch.empty(p.state_shape(p.chunks), device=x.device, dtype=p.operand)


def _gate_flags(p: Problem, i: Inputs) -> dict[str, Any]:
    return {
        "H": p.heads, "BH": p.gate_heads, "L": p.choice.chunk, "FUSED": i.A_log is not None,
        "MASKED": i.dt_mask is not None, "PACKED": p.packed, "num_warps": 4,
    }  # fmt: skip


def _gate_programs(p: Problem) -> int:
    return p.chunks * -(-p.heads // p.gate_heads)


def backward(p: Problem, d: OutputGradients, kept: Kept) -> Gradients:
    """Gradients of all inputs; states that were not kept are scanned again."""
    i, table, states, dy = kept.inputs, kept.table, kept.states, d.y
    rows, choice, L = _rows(p, i), p.choice, p.choice.chunk
    fp32: dict[str, Any] = {"device": dy.device, "dtype": torch.float32}
    make = torch.zeros if p.packed else torch.empty
    if not states.numel():
        states = _new_states(p, rows.x)
        _scan(p, rows.x, rows.B, table, i.initial, rows.packing, False, None, states)
    need_initial, skip, fused = i.initial is not None, i.D is not None, i.A_log is not None
    d_states = torch.empty_like(states)
    d_initial = torch.empty(p.state_shape(p.sequences) if need_initial else (0,), **fp32)
    _scan(p, dy, rows.C, table, d.final, rows.packing, True, d_initial if need_initial else None, d_states)

    tma, block = _tma(p, rows.x), choice.gradient_x
    blocks = L // block.rows
    places = 3 if blocks == 2 else 1
    each = p.heads_each(places)
    pair_parts = p.heads // each
    dx = make(i.x.shape, device=dy.device, dtype=i.x.dtype)
    pairs = torch.empty(p.chunks, pair_parts, L, L, **fp32)
    z_own, z_columns, z_rows, z_full, writes, reads = (torch.empty(p.chunks, p.heads, L, **fp32) for _ in range(6))
    d_skip = make((p.chunks, p.heads, blocks) if skip else (0,), **fp32)
    launch(
        ssd_gradient_x_kernel, p.chunks * places * pair_parts,
        rows.x, rows.B, rows.C, rows.D, dy, table, d_states, *rows.packing, dx, pairs, z_own, z_columns, z_rows,
        z_full, writes, d_skip, p.tokens, each, *rows.strides, SKIP=skip, TMA=tma, **p.tile(block), **p.flags,
    )  # fmt: skip

    block = choice.gradient_bc
    blocks = L // block.rows
    each = p.heads_each(2 * blocks, 2)  # all of a group's heads are best: parts are added up by another kernel
    parts = p.heads // p.groups // each
    whole: dict[str, Any] = {"device": dy.device, "dtype": i.B.dtype if parts == 1 else torch.float32}
    dB, dC = make(parts, *i.B.shape, **whole), make(parts, *i.C.shape, **whole)
    reads_states = torch.empty(p.chunks, p.heads, blocks, **fp32)
    launch(
        ssd_gradient_bc_kernel, p.chunks * 2 * blocks * (p.heads // each),
        rows.x, rows.B, rows.C, dy, table, states, d_states, pairs, *rows.packing, dB, dC, reads, reads_states,
        p.tokens, each, pair_parts, i.B.numel(), *rows.strides, TMA=tma, **p.tile(block), **p.flags,
    )  # fmt: skip

    d_dt = make(i.dt.shape, device=dy.device, dtype=i.dt.dtype)
    d_decay = make((0,) if fused else i.dt.shape, **fp32)
    sums = make((p.chunks, 2, p.heads) if fused else (0, 2, 0), **fp32)
    launch(
        ssd_gate_gradient_kernel, _gate_programs(p),
        rows.dt, *rows.gates, table, z_own, z_columns, z_rows, z_full, reads, writes, reads_states, *rows.packing,
        d_dt, d_decay, sums, p.tokens, rows.dt.stride(1), rows.dt.stride(2), R=choice.gradient_x.rows,
        KEPT_BLOCKS=blocks, **_gate_flags(p, i),
    )  # fmt: skip
    dB, dC = (g[0] if parts == 1 else g.sum(0).to(i.B.dtype) for g in (dB, dC))
    d_D = d_skip.sum((0, 2)) if skip else d_skip
    return Gradients(dx, d_dt, dB, dC, d_decay, sums[:, 0].sum(0), sums[:, 1].sum(0), d_D, d_initial)
