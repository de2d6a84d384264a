"""Launches of the delta rule's kernels: grids, arguments, the two passes over a split sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from efla_kernels.delta_rule.buffers import (
    Gradients,
    Inputs,
    Kept,
    OutputGradients,
    Outputs,
    Saved,
    allocate_gradients,
    allocate_outputs,
    reads_values,
)
from efla_kernels.delta_rule.choices import Problem
from efla_kernels.delta_rule.gradient import gradient_kernel
from efla_kernels.delta_rule.gradient_gated import gradient_gated_kernel
from efla_kernels.delta_rule.gradient_k import gradient_k_kernel
from efla_kernels.delta_rule.gradient_q import gradient_q_kernel
from efla_kernels.delta_rule.scan import scan_kernel
from efla_kernels.delta_rule.scan_backward import scan_backward_kernel
from efla_kernels.delta_rule.solve import solve_kernel
from efla_kernels.delta_rule.split import merge_kernel, transition_kernel
from efla_kernels.launch.arguments import Packing, pack, rows_in_place, use_descriptors
from efla_kernels.launch.chunks import CHUNK
from efla_kernels.launch.dispatch import launch


class Rows(NamedTuple):
    """The inputs as the kernels read them. `gate` stands in for tensors that a launch does not read."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    write: Tensor
    decay: Tensor
    packing: Packing
    qk: tuple[int, int, int, int]  # strides of q and k: token, head; token, head
    kv: tuple[int, int, int, int]


def _rows(p: Problem, x: Inputs, v: Tensor) -> Rows:
    q, k, v, gate = rows_in_place(x.q), rows_in_place(x.k), rows_in_place(v), x.gate.contiguous()
    k_strides = (k.stride(1), k.stride(2))
    return Rows(
        q, k, v, gate,
        gate if x.write is None else x.write.contiguous(), gate if x.decay is None else x.decay.contiguous(),
        pack(x.cu_seqlens, CHUNK, p.chunks, gate),
        (q.stride(1), q.stride(2), *k_strides), (*k_strides, v.stride(1), v.stride(2)),
    )  # fmt: skip


def _tma(p: Problem, *tensors: Tensor) -> bool:
    """Whether tensor descriptors can serve: 16-bit types, and K a power of two that fills its blocks (states in whole
    tiles).
    """
    return p.dtype != torch.float32 and p.flags["BK"] == p.key_width and use_descriptors(*tensors)


def forward(p: Problem, x: Inputs) -> Outputs:
    """Outputs, final states and what the backward pass needs."""
    assert x.v is not None
    out, rows = allocate_outputs(p, x), _rows(p, x, x.v)
    saved, block = out.saved, p.choice.solve
    if not x.keep_states:  # the scan needs P, the backward pass does not
        saved = saved._replace(scores=torch.empty_like(saved.inverse))
    launch(
        solve_kernel, p.chunks * p.heads,
        rows.q, rows.k, rows.gate, rows.write, rows.decay, *rows.packing, saved.inverse, saved.scores, saved.table,
        p.tokens, p.scale, *rows.qk,
        MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages, registers=block.registers,
        **p.flags,
    )  # fmt: skip
    initial = x.initial
    if p.segments > 1:
        initial = _first_states(p, rows, saved, initial)
    _scan(p, rows, saved, initial, x.keep_states, out.o, out.final if x.output_final else None)
    return out


def _scan(
    p: Problem, rows: Rows, saved: Saved, initial: Tensor | None, keep: bool, o: Tensor | None, final: Tensor | None
) -> None:
    """Fills outputs and final states where they are given, and with `keep` S and X of `saved`."""
    width, block, unused = p.width(p.choice.scan), p.choice.scan, saved.table
    programs = p.sequences * p.segments * p.heads * -(-p.value_width // width["BV"])
    launch(
        scan_kernel, programs,
        rows.q, rows.k, rows.v, saved.inverse, saved.scores, saved.table, unused if initial is None else initial,
        rows.packing.cu_seqlens, rows.packing.first_chunk, rows.v if o is None else o,
        unused if final is None else final, saved.states, saved.solved, p.tokens, p.chunks_per_segment,
        *rows.qk, *rows.kv[2:],
        SEGMENTS=p.segments, INITIAL=initial is not None, FINAL=final is not None, OUTPUT=o is not None, SAVE=keep,
        TMA=_tma(p, rows.q, rows.k, rows.v), PACKED=p.packed, STAGES=block.stages, num_warps=block.warps,
        **width, **p.flags,
    )  # fmt: skip


def _first_states(p: Problem, rows: Rows, saved: Saved, initial: Tensor | None) -> Tensor:
    """The first state of every segment [N, segments, H, K, V]; fills `saved` with these and with the transitions."""
    built = torch.empty_like(saved.first_states)
    width, block = p.width(p.choice.transition), p.choice.transition
    blocks = -(-p.value_width // width["BV"]) + -(-p.key_width // width["BV"])
    launch(
        transition_kernel, p.sequences * p.segments * p.heads * blocks,
        rows.k, rows.v, saved.inverse, saved.table, rows.packing.cu_seqlens, rows.packing.first_chunk,
        saved.transitions, built, p.tokens, p.chunks_per_segment, *rows.kv,
        SEGMENTS=p.segments, TMA=_tma(p, rows.k, rows.v), STAGES=block.stages, num_warps=block.warps,
        **width, **p.flags,
    )  # fmt: skip
    _merge(p, saved.transitions, built, initial, saved.first_states, reverse=False, left_over=None)
    return saved.first_states


def _merge(
    p: Problem, transitions: Tensor, local: Tensor, outer: Tensor | None, carried: Tensor, reverse: bool,
    left_over: Tensor | None,
) -> None:  # fmt: skip
    """Fills `carried`, and `left_over` where it is given; see `merge_kernel`."""
    width, block, flags = p.width(p.choice.merge), p.choice.merge, p.flags
    launch(
        merge_kernel, p.sequences * p.heads * -(-p.value_width // width["BV"]),
        transitions, local, local if outer is None else outer, carried, local if left_over is None else left_over,
        SEGMENTS=p.segments, REVERSE=reverse, OUTER=outer is not None, LEFT_OVER=left_over is not None,
        H=p.heads, K=p.key_width, BK=flags["BK"], PRECISION=flags["PRECISION"], STAGES=block.stages,
        num_warps=block.warps, **width,
    )  # fmt: skip


class Adjoints(NamedTuple):
    """Gradients within the chunks, which the backward scan leaves to the kernels of q's, k's and the gates' gradients.

    Anything stands in for `solved` and `writes` where they are not stored.
    """

    states: Tensor  # dS behind each chunk [chunks, H, K, V]
    solved: Tensor  # dR [chunks, H, C, V]
    writes: Tensor  # rowsum(dR * V) of every block of V [B, T, H, blocks] fp32


def backward(p: Problem, d: OutputGradients, kept: Kept) -> Gradients:
    """Gradients of all inputs."""
    saved, x = kept
    do = d.o
    out = allocate_gradients(p, d, x)
    rows = _rows(p, x, do if x.v is None else x.v)
    keeps_scores = saved.scores.numel() > 0
    if not saved.states.numel():
        states = rows.q.new_empty(p.state_shape(p.chunks), dtype=p.operand)
        solved = rows.q.new_empty((p.chunks, p.heads, CHUNK, p.value_width), dtype=p.operand)
        saved = saved._replace(states=states, solved=solved)
        _scan(p, rows, saved, saved.first_states if p.segments > 1 else x.initial, True, None, None)
    width, block = p.width(p.choice.scan_backward), p.choice.scan_backward
    writes = reads_values(p.mode, p.decays)
    adjoints = Adjoints(
        torch.empty_like(saved.states),
        torch.empty_like(saved.solved) if p.keeps_adjoint else rows.gate,
        rows.gate.new_empty((*rows.gate.shape, p.value_blocks), dtype=torch.float32) if writes else rows.gate,
    )
    programs = p.sequences * p.segments * p.heads * p.value_blocks
    tma = _tma(p, rows.q, rows.k, rows.v, do)

    def scan(d_end: Tensor | None, d_start: Tensor | None, store: bool) -> None:
        launch(
            scan_backward_kernel, programs,
            rows.q, rows.k, rows.v, do, saved.inverse, saved.scores, saved.table,
            rows.gate if d_end is None else d_end, rows.packing.cu_seqlens, rows.packing.first_chunk, out.v,
            rows.gate if d_start is None else d_start, *adjoints, p.tokens, p.chunks_per_segment,
            *rows.qk, *rows.kv[2:],
            SEGMENTS=p.segments, D_FINAL=d_end is not None, D_INITIAL=d_start is not None,
            SCORES=keeps_scores, BOUNDED=p.bounded, STORE=store, SOLVED=p.keeps_adjoint, WRITES=writes,
            PACKED=p.packed, TMA=tma, STAGES=block.stages, num_warps=block.warps, **width, **p.flags,
        )  # fmt: skip

    d_initial = None if x.initial is None else out.initial
    if p.segments > 1:
        local = torch.empty_like(saved.first_states)
        scan(None, local, False)
        d_ends = torch.empty_like(local)
        _merge(p, saved.transitions, local, d.final, d_ends, reverse=True, left_over=d_initial)
        scan(d_ends, None, True)
    else:
        scan(d.final, d_initial, True)
    (_one_gradient if p.one_gradient else _two_gradients)(p, rows, do, saved, adjoints, out)
    return out


def _two_gradients(p: Problem, rows: Rows, do: Tensor, saved: Saved, adjoints: Adjoints, out: Gradients) -> None:
    """The gradient of q, then those of k and the gates."""
    d_scores = torch.empty_like(saved.inverse)
    block = p.choice.gradient_q
    launch(
        gradient_q_kernel, p.heads * p.chunks,
        rows.q, rows.k, do, saved.table, saved.states, saved.solved, *rows.packing, out.q, d_scores, out.decay,
        p.tokens, p.scale, *rows.qk,
        MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages, registers=block.registers,
        **p.width(block, inside=True), **p.flags,
    )  # fmt: skip
    block = p.choice.gradient_k
    launch(
        gradient_k_kernel, p.heads * p.chunks,
        rows.q, rows.k, rows.gate, rows.decay, d_scores, saved.table, saved.states, saved.solved, *adjoints,
        *rows.packing, out.k, out.gate, out.write, out.decay, p.tokens, *rows.qk,
        BLOCKS=p.value_blocks, MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages,
        registers=block.registers, **p.width(block, inside=True), **p.flags,
    )  # fmt: skip


def _one_gradient(p: Problem, rows: Rows, do: Tensor, saved: Saved, adjoints: Adjoints, out: Gradients) -> None:
    """The gradients of q, k and the gates in one kernel."""
    block = p.choice.gradient
    assert block is not None
    inputs = (rows.q, rows.k, do, rows.gate)
    last = (*rows.packing, out.q, out.k, out.gate)
    sizes = (p.tokens, p.scale, *rows.qk)
    flags = {name: p.flags[name] for name in ("H", "K", "DTYPE", "PRECISION")}
    flags.update(V=p.value_width, MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages)
    if p.decays:
        launch(
            gradient_gated_kernel, p.heads * p.chunks,
            *inputs, rows.decay, saved.table, saved.states, saved.solved, *adjoints, *last, out.decay, *sizes,
            BLOCKS=p.value_blocks, **flags,
        )  # fmt: skip
    else:
        launch(
            gradient_kernel, p.heads * p.chunks,
            *inputs, saved.table, saved.states, saved.solved, adjoints.states, out.v, *last, *sizes, **flags,
        )  # fmt: skip
