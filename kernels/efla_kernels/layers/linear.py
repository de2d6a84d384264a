"""A linear whose three matmuls are those of `tuned_matmul`, and which can add the residual stream to its result."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.backends import layer_backend
from efla_kernels.launch.op import Autograd, register
from efla_kernels.layers.residual import Stream
from efla_kernels.layers.tuned_matmul.matmul import addmm, matmul


def linear(x: Tensor, weight: Tensor, *, residual: Tensor | Stream | None = None, backend: str = "auto") -> Tensor:
    """y = x W^T, or h + x W^T for h = residual; x [..., I], W [O, I], y and h [..., O].

    dx = dy W, dW = dy^T x, dh = dy. A `Stream` is added by the matmul itself, a tensor after it. Under autocast, and
    where `layer_backend` chooses PyTorch, this is torch.nn.functional.linear.
    Raises ValueError for dtypes that differ or for shapes that do not fit.
    """
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight: expected {x.dtype} [O, I] for x [..., I] of {list(x.shape)}, got {weight.dtype} "
            f"{list(weight.shape)}"
        )
    if isinstance(residual, Tensor):
        return residual + linear(x, weight, backend=backend)
    if residual is not None:
        residual.check(x, weight.shape[0])
    if layer_backend(backend, x) == "torch" or torch.is_autocast_enabled(x.device.type):
        y = F.linear(x, weight)
        return y if residual is None else residual.add(y)
    y = linear_op(Inputs(x.reshape(-1, x.shape[-1]), weight, *((None, None) if residual is None else residual.rows())))
    # autograd must not see a view: blocks return it, and FSDP warns of views
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])


class Inputs(NamedTuple):
    """Inputs of the op; residual and link are those of a `Stream`."""

    x: Tensor  # [N, I]
    weight: Tensor  # [O, I]
    residual: Tensor | None  # [N, O]
    link: Tensor | None  # [N, O]


class OutputGradients(NamedTuple):
    """The gradient that arrives, contiguous."""

    y: Tensor


class Kept(NamedTuple):
    """What the backward pass reads, and which gradients it computes: frozen weights cost no matmul."""

    x: Tensor
    weight: Tensor
    for_x: bool
    for_weight: bool


class Gradients(NamedTuple):
    """Gradients of x and weight; empty where they are not wanted."""

    x: Tensor
    weight: Tensor


def _forward(i: Inputs) -> Tensor:
    return matmul(i.x, i.weight.t()) if i.residual is None else addmm(i.residual, i.x, i.weight.t())


def _fake(i: Inputs) -> Tensor:
    return i.x.new_empty(i.x.shape[0], i.weight.shape[0])


def _keep(i: Inputs, y: Tensor) -> Kept:
    return Kept(i.x, i.weight, i.x.requires_grad, i.weight.requires_grad)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    return Gradients(
        x=matmul(d.y, kept.weight) if kept.for_x else kept.x.new_empty(0),
        weight=matmul(d.y.t(), kept.x) if kept.for_weight else kept.weight.new_empty(0),
    )


def _backward_fake(d: OutputGradients, kept: Kept) -> Gradients:
    return Gradients(
        x=kept.x.new_empty(kept.x.shape if kept.for_x else 0),
        weight=kept.weight.new_empty(kept.weight.shape if kept.for_weight else 0),
    )


linear_op = register("linear", _forward, _fake, Autograd(_keep, _backward, _backward_fake, residual="link"))
