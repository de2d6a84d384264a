"""silu(gate) * up and its gradient in one pass over memory each.

    y = g s u,   s = sigmoid(g);   dg = dy u s (1 + g (1 - s)),   du = dy g s

torch.compile joins dg and du in a kernel over [N, 2F] in which either half reads g and dy: 7 rows of F move where 5
would do. Here a program has the same columns of both halves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.triton.eager import differentiable, traced

BLOCK = 1024  # columns of a program: 16 bytes of each tensor for each thread of four warps


@triton.jit
def swiglu_kernel(gate_up, y, F: tl.constexpr, BLOCK: tl.constexpr):
    """gate_up [N, 2F] -> y [N, F]."""
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    g = tl.load(gate_up + row * (2 * F) + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * (2 * F) + F + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * F + columns, (g / (1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_gradient_kernel(dy, gate_up, d_gate_up, F: tl.constexpr, BLOCK: tl.constexpr):
    """dy [N, F], gate_up [N, 2F] -> d_gate_up [N, 2F]."""
    blocks: tl.constexpr = (F + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    dy = tl.load(dy + row * F + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate_up + row * (2 * F) + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(gate_up + row * (2 * F) + F + columns, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    place = d_gate_up + row * (2 * F) + columns
    tl.store(place, (dy * u * s * (1.0 + g * (1.0 - s))).to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(place + F, (dy * g * s).to(d_gate_up.dtype.element_ty), mask=inside)


def _forward(gate_up: Tensor) -> Tensor:
    """gate_up [N, 2F] -> silu(gate) * up [N, F]."""
    gate_up = gate_up.contiguous()
    N, F = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(N, F)
    swiglu_kernel[(N * triton.cdiv(F, BLOCK),)](gate_up, y, F=F, BLOCK=BLOCK, num_warps=4)
    return y


def _backward(dy: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate_up, [N, 2F]."""
    dy, gate_up = dy.contiguous(), gate_up.contiguous()
    N, F = dy.shape
    d_gate_up = torch.empty_like(gate_up)
    swiglu_gradient_kernel[(N * triton.cdiv(F, BLOCK),)](dy, gate_up, d_gate_up, F=F, BLOCK=BLOCK, num_warps=4)
    return d_gate_up


swiglu = torch.library.custom_op("efla_kernels::swiglu", _forward, mutates_args=())
swiglu_backward = torch.library.custom_op("efla_kernels::swiglu_backward", _backward, mutates_args=())


@swiglu.register_fake
def _(gate_up):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@swiglu_backward.register_fake
def _(dy, gate_up):
    return gate_up.new_empty(gate_up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    backward = swiglu_backward if traced() else _backward
    return backward(dy, *ctx.saved_tensors)


activate = differentiable(swiglu, _forward, _setup, _gradient)
