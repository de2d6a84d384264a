"""The second half of a SwiGLU MLP, y = h W^T with h = silu(gate) * up, as a registered op.

    h = g s u,   s = sigmoid(g);   dh = dy W,   dg = dh u s (1 + g (1 - s)),   du = dh g s,   dW = dy^T h

g and u are gate and up times their row's scale r, where there is one; the gradients of gate and up are r dg and r du.

h is not kept: one backward kernel reads g, u and dh, and writes dg, du and (in dh's place) h, which dW needs. It moves
six rows of F numbers per token. torch.compile moves ten: it recomputes h in a kernel of its own, and its gradient
kernel over [N, 2F] reads g and dh in both halves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.launch.dispatch import launch
from efla_kernels.launch.op import Autograd, register
from efla_kernels.layers.tuned_matmul.matmul import addmm, matmul

BLOCK, WARPS = 1024, 4  # columns of a program: 16 bytes of each tensor per thread of four warps


@triton.jit
def swiglu_kernel(gate_up, row_scale, h, F: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """gate_up [N, 2F], row_scale fp32 [N] (read if SCALED) -> h [N, F]."""
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    g = tl.load(gate_up + row * (2 * F) + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * (2 * F) + F + columns, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        r = tl.load(row_scale + row)
        g *= r
        u *= r
    tl.store(h + row * F + columns, (g / (1.0 + tl.exp(-g)) * u).to(h.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(
    dh, gate_up, row_scale, d_gate_up, F: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):
    """dh [N, F], gate_up [N, 2F], row_scale fp32 [N] (read if SCALED) -> d_gate_up [N, 2F], and h in dh's place.

    h has the same bits as the forward kernel's.
    """
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    at = dh + row * F + columns
    dh = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate_up + row * (2 * F) + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * (2 * F) + F + columns, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        r = tl.load(row_scale + row)
        g *= r
        u *= r
    e = 1.0 + tl.exp(-g)
    s = 1.0 / e
    dg = dh * u * s * (1.0 + g * (1.0 - s))
    du = dh * g * s
    if SCALED:
        dg *= r
        du *= r
    place = d_gate_up + row * (2 * F) + columns
    tl.store(place, dg.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(place + F, du.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(at, (g / e * u).to(d_gate_up.dtype.element_ty), mask=inside)


class Inputs(NamedTuple):
    """Inputs of the op; residual and link are those of a `Stream`."""

    gate_up: Tensor  # [N, 2F]
    weight: Tensor  # [D, F]
    row_scale: Tensor | None  # fp32 [N]
    residual: Tensor | None  # [N, D]
    link: Tensor | None  # [N, D]


class OutputGradients(NamedTuple):
    """The gradient that arrives, contiguous."""

    y: Tensor


class Kept(NamedTuple):
    """What the backward pass reads."""

    gate_up: Tensor
    weight: Tensor
    row_scale: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the inputs."""

    gate_up: Tensor
    weight: Tensor


def _arguments(gate_up: Tensor, row_scale: Tensor | None) -> tuple[list[Tensor], int, dict[str, Any]]:
    """What both kernels read (gate_up as the placeholder for no row_scale), their programs and constants."""
    gate_up, F = gate_up.contiguous(), gate_up.shape[1] // 2
    tensors = [gate_up, gate_up if row_scale is None else row_scale.contiguous()]
    constants = {"num_warps": WARPS, "F": F, "BLOCK": BLOCK, "SCALED": row_scale is not None}
    return tensors, gate_up.shape[0] * -(-F // BLOCK), constants


def _forward(i: Inputs) -> Tensor:
    tensors, programs, constants = _arguments(i.gate_up, i.row_scale)
    h = i.gate_up.new_empty(i.gate_up.shape[0], i.weight.shape[1])
    launch(swiglu_kernel, programs, *tensors, h, **constants)
    return matmul(h, i.weight.t()) if i.residual is None else addmm(i.residual, h, i.weight.t())


def _fake(i: Inputs) -> Tensor:
    return i.gate_up.new_empty(i.gate_up.shape[0], i.weight.shape[0])


def _keep(i: Inputs, y: Tensor) -> Kept:
    return Kept(i.gate_up, i.weight, i.row_scale)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    tensors, programs, constants = _arguments(kept.gate_up, kept.row_scale)
    h = matmul(d.y, kept.weight)  # dh until the kernel has run
    d_gate_up = torch.empty_like(tensors[0])
    launch(swiglu_gradient_kernel, programs, h, *tensors, d_gate_up, **constants)
    return Gradients(d_gate_up, matmul(d.y.t(), h))


def _backward_fake(d: OutputGradients, kept: Kept) -> Gradients:
    return Gradients(kept.gate_up.new_empty(kept.gate_up.shape), kept.weight.new_empty(kept.weight.shape))


swiglu_op = register("swiglu_linear", _forward, _fake, Autograd(_keep, _backward, _backward_fake, residual="link"))
