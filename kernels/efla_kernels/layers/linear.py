"""A linear map whose three products are those of `efla_kernels.layers.tuned_matmul.matmul`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.backends import layer_backend
from efla_kernels.launch.op import differentiable, traced
from efla_kernels.layers.residual import Stream
from efla_kernels.layers.tuned_matmul.matmul import product, product_onto


def linear(x: Tensor, weight: Tensor, *, onto: Tensor | Stream | None = None, backend: str = "auto") -> Tensor:
    """y = x W^T, or h + x W^T for h = onto, of x [..., I] and W [O, I]; returns [..., O].

    dx = dy W, dW = dy^T x, dh = dy. A `Stream` is added as the product is written, a tensor behind it.

    torch.nn.functional.linear, and nothing else under autocast or where `layer_backend` does not choose the kernels.
    Raises ValueError for dtypes that differ or for shapes that do not fit.
    """
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight: expected {x.dtype} [O, I] for x [..., I] of {list(x.shape)}, got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    if isinstance(onto, Tensor):
        return onto + linear(x, weight, backend=backend)
    if onto is not None:
        onto.check(x, weight.shape[0])
    if layer_backend(backend, x) == "torch" or torch.is_autocast_enabled(x.device.type):
        y = F.linear(x, weight)
        return y if onto is None else onto.plus(y)
    y = _linear(x.reshape(-1, x.shape[-1]), weight, *((None, None) if onto is None else onto.rows()))
    # no view to autograd: blocks return it, and FSDP warns of views
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])


def _forward(x: Tensor, weight: Tensor, h: Tensor | None, link: Tensor | None) -> Tensor:
    """x [N, I], weight [O, I], h and what takes its gradient [N, O] or None -> [N, O]."""
    return product(x, weight.t()) if h is None else product_onto(h, x, weight.t())


def _backward(dy: Tensor, x: Tensor, weight: Tensor, for_x: bool, for_weight: bool) -> tuple[Tensor, Tensor]:
    """dx and dW where they are asked for, else empty."""
    return (
        product(dy, weight) if for_x else x.new_empty(0),
        product(dy.t(), x) if for_weight else weight.new_empty(0),
    )


_op = torch.library.custom_op("efla_kernels::linear", _forward, mutates_args=())
_backward_op = torch.library.custom_op("efla_kernels::linear_backward", _backward, mutates_args=())


@_op.register_fake
def _(x, weight, h, link):
    return x.new_empty(x.shape[0], weight.shape[0])


@_backward_op.register_fake
def _(dy, x, weight, for_x, for_weight):
    return x.new_empty(x.shape if for_x else 0), weight.new_empty(weight.shape if for_weight else 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    backward: Callable[..., Any] = _backward_op if traced() else _backward
    for_x, for_weight, _, for_link = ctx.needs_input_grad
    dx, d_weight = backward(dy, *ctx.saved_tensors, for_x, for_weight)
    return dx if for_x else None, d_weight if for_weight else None, None, dy if for_link else None


_linear = differentiable(_op, _forward, _setup, _gradient)
