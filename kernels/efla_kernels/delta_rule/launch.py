"""Launches of the delta rule's kernels: buffers, grids, the passes over a split sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla_kernels.delta_rule.choices import CHUNK, RAW, Choice, Problem
from efla_kernels.delta_rule.gradient import gradient_kernel
from efla_kernels.delta_rule.gradient_gated import gradient_gated_kernel
from efla_kernels.delta_rule.gradient_k import gradient_k_kernel
from efla_kernels.delta_rule.gradient_q import gradient_q_kernel
from efla_kernels.delta_rule.scan import scan_kernel
from efla_kernels.delta_rule.scan_backward import scan_backward_kernel
from efla_kernels.delta_rule.solve import solve_kernel
from efla_kernels.delta_rule.split import merge_kernel, transition_kernel
from efla_kernels.launch.arguments import Packing, pack, rows_in_place, use_descriptors
from efla_kernels.launch.dispatch import launch


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass.

    Without `keep_states` the largest three, P, S and X, are empty; the backward pass computes them again, S and X by
    another scan.
    """

    inverse: Tensor  # T [chunks, H, C, C]
    scores: Tensor  # P [chunks, H, C, C]
    table: Tensor  # e, w, r (, b), |k|^2 [chunks, H, 4 or 5, C] fp32
    states: Tensor  # S before each chunk [chunks, H, K, V]
    solved: Tensor  # X [chunks, H, C, V]
    transitions: Tensor  # M [N, segments, H, K, K] fp32 where sequences were split
    first_states: Tensor  # the segments' first states [N, segments, H, K, V] fp32 where sequences were split


def _tma(p: Problem, *tensors: Tensor) -> bool:
    """Whether tensor descriptors can serve: 16-bit types, and K a power of two that fills its blocks (states in whole
    tiles).
    """
    return p.dtype != torch.float32 and p.flags["BK"] == p.key_width and use_descriptors(*tensors)


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final: bool,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Saved]:
    """Outputs, final states (empty without `output_final`) and what the backward pass needs."""
    p, choice = problem, problem.choice
    q, k, v, gate = rows_in_place(q), rows_in_place(k), rows_in_place(v), gate.contiguous()
    unused = gate
    packing = pack(cu_seqlens, CHUNK, p.chunks, unused)
    fp32: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    inverse = torch.empty(p.chunks, p.heads, CHUNK, CHUNK, device=q.device, dtype=p.operand)
    scores = torch.empty_like(inverse)
    table = torch.empty(p.chunks, p.heads, p.columns, CHUNK, **fp32)
    launch(
        solve_kernel, p.chunks * p.heads,
        q, k, gate, unused if write is None else write.contiguous(), unused if decay is None else decay.contiguous(),
        *packing, inverse, scores, table, p.tokens, p.scale, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        MODE=p.mode, PACKED=p.packed, num_warps=choice.solve.warps, num_stages=choice.solve.stages,
        registers=choice.solve.registers, **p.flags,
    )  # fmt: skip
    transitions, first_states = torch.empty(0, **fp32), torch.empty(0, **fp32)
    if p.segments > 1:
        first_states, transitions = _first_states(p, choice, k, v, inverse, table, packing, initial)
        initial = first_states
    saved = Saved(inverse, scores, table, *_states(p, keep_states, q.device), transitions, first_states)
    o, final = _scan(p, choice, q, k, v, saved, packing, initial, output_final, keep_states)
    if not keep_states:
        saved = saved._replace(scores=saved.scores.new_empty(0))
    return o, final, saved


def _rows(p: Problem, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous buffer in the shape of `like`, and in its type by default; packed rows of no segment stay zero."""
    make = torch.zeros_like if p.packed else torch.empty_like
    return make(like, dtype=dtype, memory_format=torch.contiguous_format)


def _states(p: Problem, keep: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Buffers of S [chunks, H, K, V] and X [chunks, H, C, V], or two empty tensors."""
    operand: dict[str, Any] = {"device": device, "dtype": p.operand}
    if not keep:
        return torch.empty(0, **operand), torch.empty(0, **operand)
    return (
        torch.empty(p.state_shape(p.chunks), **operand),
        torch.empty(p.chunks, p.heads, CHUNK, p.value_width, **operand),
    )


def _scan(
    p: Problem,
    choice: Choice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    packing: Packing,
    initial: Tensor | None,
    output_final: bool,
    keep: bool,
    output: bool = True,
) -> tuple[Tensor, Tensor]:
    """Outputs, or without `output` an empty tensor, and final states; with `keep` also fills S and X of `saved`."""
    o = _rows(p, v) if output else v.new_empty(0)
    final_shape = p.state_shape(p.sequences) if output_final else (0,)
    final = torch.empty(final_shape, device=v.device, dtype=torch.float32)
    width, block = p.width(choice.scan), choice.scan
    programs = p.sequences * p.segments * p.heads * -(-p.value_width // width["BV"])
    launch(
        scan_kernel, programs,
        q, k, v, saved.inverse, saved.scores, saved.table, saved.table if initial is None else initial,
        packing.cu_seqlens, packing.first_chunk, o, final, saved.states, saved.solved, p.tokens, p.chunks_per_segment,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        SEGMENTS=p.segments, INITIAL=initial is not None, FINAL=output_final, OUTPUT=output, SAVE=keep,
        TMA=_tma(p, q, k, v), PACKED=p.packed, STAGES=block.stages, num_warps=block.warps, **width, **p.flags,
    )  # fmt: skip
    return o, final


def _first_states(
    p: Problem,
    choice: Choice,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    table: Tensor,
    packing: Packing,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The first state of every segment [N, segments, H, K, V] and the segments' transitions."""
    fp32: dict[str, Any] = {"device": k.device, "dtype": torch.float32}
    lead = (p.sequences, p.segments)
    transitions = torch.empty(*lead, p.heads, p.key_width, p.key_width, **fp32)
    built = torch.empty(p.state_shape(*lead), **fp32)
    width, block = p.width(choice.transition), choice.transition
    blocks = -(-p.value_width // width["BV"]) + -(-p.key_width // width["BV"])
    launch(
        transition_kernel, p.sequences * p.segments * p.heads * blocks,
        k, v, inverse, table, packing.cu_seqlens, packing.first_chunk, transitions, built, p.tokens,
        p.chunks_per_segment, k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        SEGMENTS=p.segments, TMA=_tma(p, k, v), STAGES=block.stages, num_warps=block.warps, **width, **p.flags,
    )  # fmt: skip
    return _merge(p, choice, transitions, built, initial, reverse=False, left_over=None), transitions


def _merge(
    p: Problem,
    choice: Choice,
    transitions: Tensor,
    local: Tensor,
    outer: Tensor | None,
    reverse: bool,
    left_over: Tensor | None,
) -> Tensor:
    carried = torch.empty_like(local)
    width, block = p.width(choice.merge), choice.merge
    flags = p.flags
    launch(
        merge_kernel, p.sequences * p.heads * -(-p.value_width // width["BV"]),
        transitions, local, local if outer is None else outer, carried, local if left_over is None else left_over,
        SEGMENTS=p.segments, REVERSE=reverse, OUTER=outer is not None, LEFT_OVER=left_over is not None,
        H=p.heads, K=p.key_width, BK=flags["BK"], PRECISION=flags["PRECISION"], STAGES=block.stages,
        num_warps=block.warps, **width,
    )  # fmt: skip
    return carried


class Gradients(NamedTuple):
    """Gradients of the op's inputs; empty tensors where there is no such input."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    write: Tensor
    decay: Tensor
    initial: Tensor


def reads_values(mode: int, decays: bool) -> bool:
    """Whether `backward` reads v where states were kept: for dL/d ln w, where that is wanted apart from dL/d ln e."""
    return decays or mode == RAW


def backward(
    problem: Problem,
    saved: Saved,
    do: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Gradients:
    """Gradients of all inputs from do [B, T, H, V] and the final states' gradient.

    Without states in `saved` they are computed again; with them and without `reads_values` anything like v will do.
    """
    p, choice = problem, problem.choice
    q, k, v, gate, do = rows_in_place(q), rows_in_place(k), rows_in_place(v), gate.contiguous(), do.contiguous()
    unused = gate
    packing = pack(cu_seqlens, CHUNK, p.chunks, unused)
    keeps_scores = saved.scores.numel() > 0
    if not saved.states.numel():
        saved = saved._replace(**dict(zip(("states", "solved"), _states(p, True, q.device), strict=True)))
        first = saved.first_states if p.segments > 1 else initial
        _scan(p, choice, q, k, v, saved, packing, first, False, True, output=False)
    fp32: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    need_initial = initial is not None
    dv = _rows(p, v)
    d_initial = torch.empty(p.state_shape(p.sequences) if need_initial else (0,), **fp32)
    d_states = torch.empty_like(saved.states)
    d_solved = torch.empty_like(saved.solved) if p.keeps_adjoint else unused
    width, block = p.width(choice.scan_backward), choice.scan_backward
    blocks = -(-p.value_width // width["BV"])
    programs = p.sequences * p.segments * p.heads * blocks
    writes = reads_values(p.mode, p.decays)
    d_writes = torch.empty(*gate.shape, blocks, **fp32) if writes else unused
    tma = _tma(p, q, k, v, do)

    def scan(d_end: Tensor | None, d_start: Tensor | None, store: bool) -> None:
        launch(
            scan_backward_kernel, programs,
            q, k, v, do, saved.inverse, saved.scores, saved.table, unused if d_end is None else d_end,
            packing.cu_seqlens, packing.first_chunk, dv, unused if d_start is None else d_start, d_states, d_solved,
            d_writes, p.tokens, p.chunks_per_segment,
            q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2),
            SEGMENTS=p.segments, D_FINAL=d_end is not None, D_INITIAL=d_start is not None,
            SCORES=keeps_scores, BOUNDED=p.bounded, STORE=store, SOLVED=p.keeps_adjoint, WRITES=writes,
            PACKED=p.packed, TMA=tma, STAGES=block.stages, num_warps=block.warps, **width, **p.flags,
        )  # fmt: skip

    if p.segments > 1:
        local = torch.empty(p.state_shape(p.sequences, p.segments), **fp32)
        scan(None, local, False)
        left_over = d_initial if need_initial else None
        d_ends = _merge(p, choice, saved.transitions, local, d_final, reverse=True, left_over=left_over)
        scan(d_ends, None, True)
    else:
        scan(d_final, d_initial if need_initial else None, True)

    dq, dk, d_gate = _rows(p, q), _rows(p, k), _rows(p, gate)
    d_write = gate.new_empty(0) if write is None else _rows(p, write)
    d_decay = _rows(p, gate, torch.float32) if p.decays else torch.empty(0, **fp32)
    gradients = Gradients(dq, dk, dv, d_gate, d_write, d_decay, d_initial)
    decay = unused if decay is None else decay.contiguous()
    if p.one_gradient:
        _gradient(p, q, k, do, gate, decay, saved, d_states, d_solved, d_writes, packing, gradients)
        return gradients
    d_scores = torch.empty_like(saved.inverse)
    width, block = p.width(choice.gradient_q, inside=True), choice.gradient_q
    launch(
        gradient_q_kernel, p.heads * p.chunks,
        q, k, do, saved.table, saved.states, saved.solved, *packing, dq, d_scores, d_decay,
        p.tokens, p.scale, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages, registers=block.registers,
        **width, **p.flags,
    )  # fmt: skip
    width, block = p.width(choice.gradient_k, inside=True), choice.gradient_k
    launch(
        gradient_k_kernel, p.heads * p.chunks,
        q, k, gate, decay, d_scores, saved.table, saved.states, saved.solved, d_states, d_solved, d_writes, *packing,
        dk, d_gate, d_write, d_decay, p.tokens, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        BLOCKS=blocks, MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages,
        registers=block.registers, **width, **p.flags,
    )  # fmt: skip
    return gradients


def _gradient(
    p: Problem,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    gate: Tensor,
    decay: Tensor,
    saved: Saved,
    d_states: Tensor,
    d_solved: Tensor,
    d_writes: Tensor,
    packing: Packing,
    out: Gradients,
) -> None:
    """The gradients of q, k and the gates in one kernel."""
    block = p.choice.gradient
    assert block is not None
    last = (p.tokens, p.scale, q.stride(1), q.stride(2), k.stride(1), k.stride(2))
    flags = {name: p.flags[name] for name in ("H", "K", "DTYPE", "PRECISION")}
    flags.update(V=p.value_width, MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages)
    if p.decays:
        launch(
            gradient_gated_kernel, p.heads * p.chunks,
            q, k, do, gate, decay, saved.table, saved.states, saved.solved, d_states, d_solved, d_writes, *packing,
            out.q, out.k, out.gate, out.decay, *last, BLOCKS=d_writes.shape[-1], **flags,
        )  # fmt: skip
    else:
        launch(
            gradient_kernel, p.heads * p.chunks,
            q, k, do, gate, saved.table, saved.states, saved.solved, d_states, out.v, *packing,
            out.q, out.k, out.gate, *last, **flags,
        )  # fmt: skip
