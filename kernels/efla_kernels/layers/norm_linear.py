"""RMS norms of a block in training, each fused with what reads its result, so that the result itself is not written.

`norm_linear`: the norm of the residual stream and the linear maps behind it. A norm scales rows, and a product leaves
rows apart, so the product takes the stream itself and the factor follows:

    r = 1 / sqrt(mean(h^2) + eps),   raw_i = h W_i^T,   logits = r * (h W_g^T)

Whoever reads raw_i multiplies its rows by r, a constant to him. The gradient of r comes with that of h all the same:
with g = sum_i d_raw_i W_i + r * d_logits W_g the loss depends on r through r * h alone, hence

    dh = g - h r^2 <g, h> / D  (+ the gradient of h where it goes on, see `Stream`),
    dW_i = d_raw_i^T h,   dW_g = (r * d_logits)^T h

`unit_rms_norm`: y = x r over the last dimension, which keeps y and r in place of x, as the product behind it keeps y:

    dx = r (dy - y <dy, y> / D)

The weights of the norms are in W_i, W_g and the weight behind y. Statistics are fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from efla_kernels.backends import layer_backend
from efla_kernels.launch.op import differentiable, traced
from efla_kernels.layers.residual import Stream
from efla_kernels.layers.tuned_matmul.matmul import add_product, product


def norm_linear(
    h: Tensor,
    weights: Sequence[Tensor],
    narrow: Tensor | None = None,
    *,
    eps: float,
    backend: str = "auto",
) -> tuple[Stream, tuple[Tensor, ...], Tensor, Tensor | None]:
    """(h as it goes on, raws, r, logits) of the module's first equation.

    Args:
        h: [..., D].
        weights: one or two matrices [O, D]; raws are [..., O] each, without the factor r.
        narrow: [G, D], the maps of a few rows (gates), joined; logits [..., G] have the factor. None: no logits.
        eps: added to the mean square.
        backend: see `efla_kernels.backends.layer_backend`.

    All of one dtype, which is the results', under autocast too; r [...] is fp32 (fp64 for fp64) and has no gradient.
    What reads h behind this takes it from the `Stream`: its gradient is added to h's in the backward pass's own kernel.
    raws may overflow in fp16 where rows are long.
    Raises ValueError for dtypes that differ or are not floating point, or for shapes that do not fit.
    """
    _check(h, weights, narrow)
    second = weights[1] if len(weights) == 2 else None
    inputs = [h.reshape(-1, h.shape[-1]), weights[0], second, narrow]
    kernels = layer_backend(backend, h) == "triton" and h.numel() > 0
    if kernels and not h.is_cuda:  # the interpreter rounds to 16 bits by truncation: nothing of 16 bits reaches it
        inputs = [None if t is None else t.float() for t in inputs]
    with torch.autocast(h.device.type, enabled=False):  # products have their operands' dtype, forward and back
        r, logits, link, *raws = _norm_linear(*inputs, eps, kernels)
    back = h.shape[:-1]
    return (
        Stream(h.detach(), link.to(h.dtype)),
        tuple(raw.to(h.dtype).view(*back, weight.shape[0]) for raw, weight in zip(raws, weights)),
        r.detach().view(back),
        None if narrow is None else logits.to(h.dtype).view(*back, narrow.shape[0]),
    )


def unit_rms_norm(x: Tensor, *, eps: float, backend: str = "auto") -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) over the last dimension of x [..., D]; the backward pass reads y.

    Raises ValueError for x that is not floating point.
    """
    if x.dim() < 1 or not x.is_floating_point():
        raise ValueError(f"x: expected a floating point tensor [..., D], got {x.dtype} {list(x.shape)}")
    kernels = layer_backend(backend, x) == "triton" and x.numel() > 0
    rows = x.reshape(-1, x.shape[-1])
    rows = rows.float() if kernels and not x.is_cuda else rows
    return _unit(rows, eps, kernels)[0].to(x.dtype).view(x.shape)


def _check(h: Tensor, weights: Sequence[Tensor], narrow: Tensor | None) -> None:
    if h.dim() < 1 or not h.is_floating_point():
        raise ValueError(f"h: expected a floating point tensor [..., D], got {h.dtype} {list(h.shape)}")
    if len(weights) not in (1, 2):
        raise ValueError(f"weights: expected one or two matrices [O, D], got {len(weights)}; join those of more maps")
    for weight in (*weights, *([] if narrow is None else [narrow])):
        if weight.dim() != 2 or weight.shape[1] != h.shape[-1] or weight.dtype != h.dtype:
            raise ValueError(f"weights: expected {h.dtype} [O, {h.shape[-1]}], got {weight.dtype} {list(weight.shape)}")


def _forward(
    h: Tensor, weight: Tensor, second: Tensor | None, narrow: Tensor | None, eps: float, kernels: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(r, logits, link, raw, raw of `second`) of h [N, D]; empty is what there is none of."""
    if kernels:
        from efla_kernels.layers.norm_kernels import norm_factors  # triton is there wherever it is chosen

        r, logits = norm_factors(h, narrow, eps)
    else:
        wide = _wide(h)
        r = (wide.square().mean(-1) + eps).rsqrt()
        logits = h.new_empty(0) if narrow is None else (wide @ _wide(narrow).t() * r[:, None]).to(h.dtype)
    multiply = product if kernels else torch.mm
    other = h.new_empty(0) if second is None else multiply(h, second.t())
    return r, logits, _link(h), multiply(h, weight.t()), other


def _link(h: Tensor) -> Tensor:
    """See `Stream`."""
    return h.new_zeros(()).expand(h.shape)


def _backward(
    dh: Tensor | None,
    d_logits: Tensor | None,
    d_raw: Tensor | None,
    d_second: Tensor | None,
    h: Tensor,
    r: Tensor,
    logits: Tensor,
    weight: Tensor,
    second: Tensor | None,
    narrow: Tensor | None,
    kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of h, `weight`, `second` and `narrow`, the last two empty where there is none; dh: that of h where
    it goes on."""
    multiply, add = (product, add_product) if kernels else (torch.mm, Tensor.addmm_)
    if d_raw is None:
        g, d_weight = torch.zeros_like(h, memory_format=torch.contiguous_format), torch.zeros_like(weight)
    else:
        g, d_weight = multiply(d_raw, weight), multiply(d_raw.t(), h)
    d_other, d_narrow = h.new_empty(0), h.new_empty(0)
    if second is not None and d_second is None:
        d_other = torch.zeros_like(second)
    elif second is not None and d_second is not None:
        add(g, d_second, second)
        d_other = multiply(d_second.t(), h)
    if kernels:
        from efla_kernels.layers.norm_kernels import norm_gradient

        dx, slopes = norm_gradient(g, dh, h, r, logits, d_logits, narrow)
    else:
        dx, slopes = _gradient_of_sum(_wide(g), dh, h, r, d_logits, narrow)
    if narrow is not None:
        d_narrow = torch.zeros_like(narrow) if slopes is None else slopes.t() @ h
    return dx, d_weight, d_other, d_narrow


def _gradient_of_sum(
    g: Tensor, dh: Tensor | None, h: Tensor, r: Tensor, d_logits: Tensor | None, narrow: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(dx, r * d_logits) by PyTorch's operations."""
    wide, slopes = _wide(h), None
    if narrow is not None and d_logits is not None:
        slopes = (_wide(d_logits) * r[:, None]).to(h.dtype)
        g = g + _wide(slopes) @ _wide(narrow)
    dx = g - wide * (r.square() * (g * wide).mean(-1))[:, None]
    return (dx if dh is None else dx + dh).to(h.dtype), slopes


def _wide(x: Tensor) -> Tensor:
    """x in the dtype of its statistics."""
    return x if x.dtype.itemsize >= 4 else x.float()


_norm_linear_op = torch.library.custom_op("efla_kernels::norm_linear", _forward, mutates_args=())
_norm_linear_backward = torch.library.custom_op("efla_kernels::norm_linear_backward", _backward, mutates_args=())


@_norm_linear_op.register_fake
def _(h, weight, second, narrow, eps, kernels):
    N = h.shape[0]
    return (
        _wide(h).new_empty(N),
        h.new_empty(0) if narrow is None else h.new_empty(N, narrow.shape[0]),
        _link(h),
        h.new_empty(N, weight.shape[0]),
        h.new_empty(0) if second is None else h.new_empty(N, second.shape[0]),
    )


@_norm_linear_backward.register_fake
def _(dh, d_logits, d_raw, d_second, h, r, logits, weight, second, narrow, kernels):
    others = [h.new_empty(0 if w is None else w.shape) for w in (second, narrow)]
    return h.new_empty(h.shape), weight.new_empty(weight.shape), *others


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, weight, second, narrow, _, kernels = inputs
    r, logits, *_ = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(h, r, logits, weight, second, narrow)
    ctx.kernels = kernels


def _gradient(
    ctx: Any, _: Tensor | None, d_logits: Tensor | None, dh: Tensor | None, *d_raws: Tensor | None
) -> tuple[Tensor | None, ...]:
    backward: Callable[..., Any] = _norm_linear_backward if traced() else _backward
    h, r, logits, weight, second, narrow = ctx.saved_tensors
    dx, d_weight, d_second, d_narrow = backward(
        dh, d_logits, *d_raws, h, r, logits, weight, second, narrow, ctx.kernels
    )
    return dx, d_weight, None if second is None else d_second, None if narrow is None else d_narrow, None, None


_norm_linear = differentiable(_norm_linear_op, _forward, _setup, _gradient)


def _unit_forward(x: Tensor, eps: float, kernels: bool) -> tuple[Tensor, Tensor]:
    """(y, r) of x [N, D]."""
    if kernels:
        from efla_kernels.layers.norm_kernels import unit

        return unit(x, eps)
    wide = _wide(x)
    r = (wide.square().mean(-1) + eps).rsqrt()
    return (wide * r[:, None]).to(x.dtype), r


def _unit_backward(dy: Tensor, y: Tensor, r: Tensor, kernels: bool) -> Tensor:
    if kernels:
        from efla_kernels.layers.norm_kernels import unit_gradient

        return unit_gradient(dy, y, r)
    slope, wide = _wide(dy), _wide(y)
    return ((slope - wide * (slope * wide).mean(-1, keepdim=True)) * r[:, None]).to(y.dtype)


_unit_op = torch.library.custom_op("efla_kernels::unit_rms_norm", _unit_forward, mutates_args=())
_unit_backward_op = torch.library.custom_op("efla_kernels::unit_rms_norm_backward", _unit_backward, mutates_args=())


@_unit_op.register_fake
def _(x, eps, kernels):
    return x.new_empty(x.shape), _wide(x).new_empty(x.shape[0])


@_unit_backward_op.register_fake
def _(dy, y, r, kernels):
    return y.new_empty(y.shape)


def _unit_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output)
    ctx.kernels = inputs[2]


def _unit_gradient(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None, None]:
    backward: Callable[..., Any] = _unit_backward_op if traced() else _unit_backward
    return None if dy is None else backward(dy, *ctx.saved_tensors, ctx.kernels), None, None


_unit = differentiable(_unit_op, _unit_forward, _unit_setup, _unit_gradient)
