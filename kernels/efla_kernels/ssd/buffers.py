"""Inputs, outputs and gradients of the op of state-space duality, and their allocation, also for the fake."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla_kernels.ssd.choices import Problem


class Inputs(NamedTuple):
    """Inputs of the op, with batch rows of T tokens, H heads in G groups, `sequences` states.

    Steps and decays are dt and log_decay where log_decay is given, else they are made of dt, A_log, dt_bias, dt_mask.
    """

    x: Tensor  # [batch, T, H, P]
    dt: Tensor  # [batch, T, H]
    B: Tensor  # [batch, T, G, N]
    C: Tensor  # [batch, T, G, N]
    log_decay: Tensor | None  # [batch, T, H]
    A_log: Tensor | None  # [H]
    dt_bias: Tensor | None  # [H]
    D: Tensor | None  # [H]
    dt_mask: Tensor | None  # [batch, T]
    initial: Tensor | None  # [sequences, H, N, P] fp32
    cu_seqlens: Tensor | None  # [sequences + 1]
    output_final: bool
    keep_states: bool


class Outputs(NamedTuple):
    """Outputs of the op; the last two serve the backward pass."""

    y: Tensor  # [batch, T, H, P]
    final: Tensor  # [sequences, H, N, P] fp32, or empty
    table: Tensor  # steps and cumulative decays [chunks, H, 2, L] fp32
    states: Tensor  # S before each chunk [chunks, H, N, P], or empty: the backward pass scans again


class OutputGradients(NamedTuple):
    """Gradients that arrive, contiguous."""

    y: Tensor
    final: Tensor | None


class Kept(NamedTuple):
    """What the backward pass reads."""

    table: Tensor
    states: Tensor
    inputs: Inputs


class Gradients(NamedTuple):
    """Gradients of the inputs; empty where there is no such input."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    log_decay: Tensor
    A_log: Tensor
    dt_bias: Tensor
    D: Tensor
    initial: Tensor


def kept(i: Inputs, o: Outputs) -> Kept:
    """What the backward pass reads."""
    return Kept(o.table, o.states, i)


def allocate_outputs(p: Problem, i: Inputs) -> Outputs:
    """Buffers for the outputs. Packed rows that no segment covers are zero."""
    fp32: dict[str, Any] = {"dtype": torch.float32}
    return Outputs(
        y=(i.x.new_zeros if p.packed else i.x.new_empty)(i.x.shape),
        final=i.x.new_empty(p.state_shape(p.sequences) if i.output_final else (0,), **fp32),
        table=i.x.new_empty(p.chunks, p.heads, 2, p.choice.chunk, **fp32),
        states=i.x.new_empty(p.state_shape(p.chunks) if i.keep_states else (0,), dtype=p.operand),
    )


def gradients_like(p: Problem, i: Inputs) -> Gradients:
    """Tensors in the shapes of the gradients, for the fake."""
    fp32: dict[str, Any] = {"dtype": torch.float32}
    fused, x = i.A_log is not None, i.x
    return Gradients(
        x=x.new_empty(x.shape),
        dt=i.dt.new_empty(i.dt.shape),
        B=i.B.new_empty(i.B.shape),
        C=i.C.new_empty(i.C.shape),
        log_decay=x.new_empty((0,) if fused else i.dt.shape, **fp32),
        A_log=x.new_empty(p.heads if fused else 0, **fp32),
        dt_bias=x.new_empty(p.heads if fused else 0, **fp32),
        D=x.new_empty(0 if i.D is None else p.heads, **fp32),
        initial=x.new_empty((0,) if i.initial is None else p.state_shape(p.sequences), **fp32),
    )
