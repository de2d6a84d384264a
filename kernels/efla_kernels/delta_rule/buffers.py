"""Inputs, outputs and gradients of the delta rule's op, and their allocation, which also serves as the op's fake."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla_kernels.delta_rule.choices import RAW, Problem
from efla_kernels.launch.chunks import CHUNK


class Inputs(NamedTuple):
    """Inputs of the op, with B rows of T tokens, H heads, N sequences."""

    q: Tensor  # [B, T, H, K]
    k: Tensor  # [B, T, H, K]
    v: Tensor | None  # [B, T, H, V]; None in the backward pass where it is not read
    gate: Tensor  # [B, T, H] beta's logit; RAW: erase
    write: Tensor | None  # [B, T, H], RAW only
    decay: Tensor | None  # [B, T, H] log_g; RAW: log_decay
    initial: Tensor | None  # [N, H, K, V] fp32
    cu_seqlens: Tensor | None  # [N + 1]
    mode: int
    scale: float
    segments: int  # that every row is cut into
    output_final: bool
    keep_states: bool


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass.

    Without `keep_states` P, S and X, the largest three, are empty; the backward pass computes them again, S and X by
    another scan. The last two are empty where sequences were not split.
    """

    inverse: Tensor  # T [chunks, H, C, C]
    scores: Tensor  # P [chunks, H, C, C]
    table: Tensor  # e, w, r (, b), |k|^2 [chunks, H, 4 or 5, C] fp32
    states: Tensor  # S before each chunk [chunks, H, K, V]
    solved: Tensor  # X [chunks, H, C, V]
    transitions: Tensor  # M [N, segments, H, K, K] fp32
    first_states: Tensor  # the segments' first states [N, segments, H, K, V] fp32


class Outputs(NamedTuple):
    """Outputs of the op."""

    o: Tensor  # [B, T, H, V]
    final: Tensor  # [N, H, K, V] fp32, or empty
    saved: Saved


class OutputGradients(NamedTuple):
    """Gradients that arrive, contiguous."""

    o: Tensor
    final: Tensor | None


class Kept(NamedTuple):
    """What the backward pass reads."""

    saved: Saved
    inputs: Inputs


class Gradients(NamedTuple):
    """Gradients of the inputs; empty where there is no such input."""

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


def kept(x: Inputs, out: Outputs) -> Kept:
    """What the backward pass reads; without v where it does not read v."""
    read = not x.keep_states or reads_values(x.mode, x.decay is not None)
    return Kept(out.saved, x if read else x._replace(v=None))


def allocate_outputs(p: Problem, x: Inputs) -> Outputs:
    """Buffers for the outputs of the forward pass."""
    assert x.v is not None
    fp32: dict[str, Any] = {"dtype": torch.float32}
    operand: dict[str, Any] = {"dtype": p.operand}
    q, slots, nothing = x.q, (p.chunks, p.heads), (0,)
    keep, split = x.keep_states, p.segments > 1
    saved = Saved(
        inverse=q.new_empty((*slots, CHUNK, CHUNK), **operand),
        scores=q.new_empty((*slots, CHUNK, CHUNK) if keep else nothing, **operand),
        table=q.new_empty((*slots, p.columns, CHUNK), **fp32),
        states=q.new_empty(p.state_shape(p.chunks) if keep else nothing, **operand),
        solved=q.new_empty((*slots, CHUNK, p.value_width) if keep else nothing, **operand),
        transitions=q.new_empty(
            (p.sequences, p.segments, p.heads, p.key_width, p.key_width) if split else nothing, **fp32
        ),
        first_states=q.new_empty(p.state_shape(p.sequences, p.segments) if split else nothing, **fp32),
    )
    final = q.new_empty(p.state_shape(p.sequences) if x.output_final else nothing, **fp32)
    return Outputs(rows_like(p, x.v), final, saved)


def allocate_gradients(p: Problem, d: OutputGradients, x: Inputs) -> Gradients:
    """Buffers for the gradients of the inputs."""
    fp32: dict[str, Any] = {"dtype": torch.float32}
    return Gradients(
        q=rows_like(p, x.q),
        k=rows_like(p, x.k),
        v=rows_like(p, d.o if x.v is None else x.v),
        gate=rows_like(p, x.gate),
        write=x.gate.new_empty(0) if x.write is None else rows_like(p, x.write),
        decay=x.gate.new_empty(0, **fp32) if x.decay is None else rows_like(p, x.gate, torch.float32),
        initial=x.q.new_empty(p.state_shape(p.sequences) if x.initial is not None else (0,), **fp32),
    )


def rows_like(p: Problem, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous buffer in the shape of x, and in its type by default; zeros where rows may belong to no segment."""
    make = torch.zeros_like if p.packed else torch.empty_like
    return make(x, dtype=dtype, memory_format=torch.contiguous_format)
