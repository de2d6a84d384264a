"""RMS norm without weight, for a norm whose result the following linear keeps anyway.

    y = x r,   r = 1 / sqrt(mean(x^2) + eps),   dx = r (dy - y <dy, y> / D)

The backward pass reads y and r, so x need not be kept. The norm's weight is folded into the linear. Statistics are fp32
(fp64 for fp64 inputs).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from efla_kernels.backends import layer_backend
from efla_kernels.launch.op import Autograd, register
from efla_kernels.layers import norm_torch


def unit_rms_norm(x: Tensor, *, eps: float, backend: str = "auto") -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) over the last dimension of x [..., D]; backend: see `layer_backend`.

    Raises ValueError for x that is not floating point.
    """
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"x: expected a floating point tensor [..., D], got {x.dtype} {list(x.shape)}")
    kernels = layer_backend(backend, x) == "triton" and x.numel() > 0
    rows = x.reshape(-1, x.shape[-1])
    rows = rows.float() if kernels and not x.is_cuda else rows
    return unit_norm_op(Inputs(rows, eps, kernels)).to(x.dtype).view(x.shape)


class Inputs(NamedTuple):
    """Inputs of the op."""

    x: Tensor  # [N, D]
    eps: float
    kernels: bool


class Outputs(NamedTuple):
    """Outputs of the op; r serves the backward pass."""

    y: Tensor  # [N, D]
    r: Tensor  # [N] fp32 (fp64 for fp64)


class OutputGradients(NamedTuple):
    """The gradient that arrives, contiguous."""

    y: Tensor


class Kept(NamedTuple):
    """What the backward pass reads."""

    y: Tensor
    r: Tensor
    kernels: bool


class Gradients(NamedTuple):
    """The input's gradient."""

    x: Tensor


def _forward(i: Inputs) -> Outputs:
    if i.kernels:
        from efla_kernels.layers.norm_kernels import unit  # Triton is installed wherever it is chosen

        return Outputs(*unit(i.x, i.eps))
    return Outputs(*norm_torch.unit(i.x, i.eps))


def _fake(i: Inputs) -> Outputs:
    return Outputs(i.x.new_empty(i.x.shape), norm_torch.widened(i.x).new_empty(i.x.shape[0]))


def _keep(i: Inputs, o: Outputs) -> Kept:
    return Kept(o.y, o.r, i.kernels)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    if kept.kernels:
        from efla_kernels.layers.norm_kernels import unit_gradient

        return Gradients(unit_gradient(d.y, kept.y, kept.r))
    return Gradients(norm_torch.unit_gradient(d.y, kept.y, kept.r))


def _backward_fake(d: OutputGradients, kept: Kept) -> Gradients:
    return Gradients(kept.y.new_empty(kept.y.shape))


unit_norm_op = register("unit_rms_norm", _forward, _fake, Autograd(_keep, _backward, _backward_fake), results=1)
