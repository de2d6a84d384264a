"""A SwiGLU's second half, y = h W^T with h = silu(gate) * up: h is neither kept nor computed by a pass of its own.

    h = g s u,   s = sigmoid(g);   dh = dy W,   dg = dh u s (1 + g (1 - s)),   du = dh g s,   dW = dy^T h

g and u are gate and up, times a factor of their row where there is one; the gradients of gate and up are dg and du
times the same.

The backward pass needs h for dW alone, and g, u and dh for the rest: one kernel reads these three and writes dg, du and
h, in dh's place, six rows of F in all. torch.compile takes ten: h again from g and u, and dg and du from a kernel over
[N, 2F] in which either half reads g and dh.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.launch.dispatch import launch
from efla_kernels.launch.op import differentiable, traced
from efla_kernels.layers.tuned_matmul.matmul import product, product_onto

BLOCK, WARPS = 1024, 4  # columns of a program: 16 bytes of each tensor for each thread of four warps


@triton.jit
def swiglu_kernel(gate_up, factors, h, F: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """gate_up [N, 2F], factors fp32 [N] (used if SCALED) -> h [N, F]."""
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    g = tl.load(gate_up + row * (2 * F) + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * (2 * F) + F + columns, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        r = tl.load(factors + row)
        g *= r
        u *= r
    tl.store(h + row * F + columns, (g / (1.0 + tl.exp(-g)) * u).to(h.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(dh, gate_up, factors, d_gate_up, F: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    """dh [N, F], gate_up [N, 2F], factors fp32 [N] (used if SCALED) -> d_gate_up [N, 2F], and in place of dh h, the
    same bits as the forward kernel's.
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
        r = tl.load(factors + row)
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


def _flags(F: int, factors: Tensor | None) -> dict[str, Any]:
    return {"num_warps": WARPS, "F": F, "BLOCK": BLOCK, "SCALED": factors is not None}


def _forward(
    gate_up: Tensor, weight: Tensor, factors: Tensor | None, stream: Tensor | None, link: Tensor | None
) -> Tensor:
    """gate_up [N, 2F], weight [D, F], factors fp32 [N], a stream and what takes its gradient [N, D], the last three or
    None -> y [N, D], added to the stream where there is one."""
    gate_up = gate_up.contiguous()
    N, F = gate_up.shape[0], gate_up.shape[1] // 2
    h = gate_up.new_empty(N, F)
    rows = gate_up if factors is None else factors.contiguous()
    launch(swiglu_kernel, N * -(-F // BLOCK), gate_up, rows, h, **_flags(F, factors))
    return product(h, weight.t()) if stream is None else product_onto(stream, h, weight.t())


def _backward(dy: Tensor, gate_up: Tensor, weight: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gradients of gate_up [N, 2F] and W [D, F]."""
    gate_up = gate_up.contiguous()
    h = product(dy, weight)  # dh until the kernel has run
    N, F = h.shape
    d_gate_up = torch.empty_like(gate_up)
    rows = gate_up if factors is None else factors.contiguous()
    launch(swiglu_gradient_kernel, N * -(-F // BLOCK), h, gate_up, rows, d_gate_up, **_flags(F, factors))
    return d_gate_up, product(dy.t(), h)


swiglu_linear = torch.library.custom_op("efla_kernels::swiglu_linear", _forward, mutates_args=())
swiglu_backward = torch.library.custom_op("efla_kernels::swiglu_backward", _backward, mutates_args=())


@swiglu_linear.register_fake
def _(gate_up, weight, factors, stream, link):
    return gate_up.new_empty(gate_up.shape[0], weight.shape[0])


@swiglu_backward.register_fake
def _(dy, gate_up, weight, factors):
    return gate_up.new_empty(gate_up.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    backward = swiglu_backward if traced() else _backward
    return *backward(dy, *ctx.saved_tensors), None, None, dy if ctx.needs_input_grad[4] else None


project = differentiable(swiglu_linear, _forward, _setup, _gradient)
