"""RMS norm of the residual stream in training, fused with the linears that read it: norm(h) is never written.

A norm scales rows, and a matmul treats rows separately. So the matmul reads h itself and the row scale r is applied
afterwards, the norm's weight being folded into W_i and W_g:

    r = 1 / sqrt(mean(h^2) + eps),   raw_i = h W_i^T,   logits = r * (h W_g^T)

"raw" is a result without its row scale: the consumer multiplies row t by r_t. `short_convolution` and `swiglu_linear`
do so in fp32, as `row_scale`. There r is a constant; this op computes the gradient of h through r. The loss depends on
r through r * h alone, so with g = sum_i d_raw_i W_i + r * d_logits W_g, where the consumer's d_raw_i contains r,

    dh = g - h r^2 <g, h> / D  (+ the gradient of h's other reader, see `Stream`),
    dW_i = d_raw_i^T h,   dW_g = (r * d_logits)^T h

Statistics are fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla_kernels.backends import layer_backend
from efla_kernels.launch.op import Autograd, register
from efla_kernels.layers import norm_torch
from efla_kernels.layers.norm_torch import Inputs, Kept, OutputGradients, Outputs
from efla_kernels.layers.residual import Stream
from efla_kernels.layers.tuned_matmul.matmul import addmm_, matmul


def norm_linear(
    h: Tensor,
    weights: Sequence[Tensor],
    narrow: Tensor | None = None,
    *,
    eps: float,
    backend: str = "auto",
) -> tuple[Stream, tuple[Tensor, ...], Tensor, Tensor | None]:
    """(h for its other reader, raws, r, logits) of the module's first equation.

    Args:
        h: [..., D].
        weights: one or two matrices [O, D]; raws are [..., O] each.
        narrow: [G, D], the rows of narrow linears (gates), joined; logits are [..., G]. None: no logits.
        eps: added to the mean square.
        backend: see `efla_kernels.backends.layer_backend`.

    Inputs and results have one dtype, under autocast too; r [...] is fp32 (fp64 for fp64) and has no gradient. raws may
    overflow in fp16 where rows are long.
    Raises ValueError for dtypes that differ or are not floating point, or for shapes that do not fit.
    """
    _check(h, weights, narrow)
    second = weights[1] if len(weights) == 2 else None
    kernels = layer_backend(backend, h) == "triton" and h.numel() > 0
    inputs = Inputs(h.reshape(-1, h.shape[-1]), weights[0], second, narrow, eps, kernels)
    if kernels and not h.is_cuda:  # Triton's interpreter truncates when it rounds to 16 bits, so it gets fp32
        inputs = Inputs._make(t.float() if isinstance(t, Tensor) else t for t in inputs)
    with torch.autocast(h.device.type, enabled=False):  # matmuls have their operands' dtype, forward and back
        r, logits, link, *raws = norm_linear_op(inputs)
    rows = h.shape[:-1]
    return (
        Stream(h.detach(), link.to(h.dtype)),
        tuple(raw.to(h.dtype).view(*rows, weight.shape[0]) for raw, weight in zip(raws, weights)),
        r.detach().view(rows),
        None if narrow is None else logits.to(h.dtype).view(*rows, narrow.shape[0]),
    )


def _check(h: Tensor, weights: Sequence[Tensor], narrow: Tensor | None) -> None:
    if h.dim() < 1 or not h.is_floating_point():
        raise ValueError(f"h: expected a floating point tensor [..., D], got {h.dtype} {list(h.shape)}")
    if len(weights) not in (1, 2):
        raise ValueError(f"weights: expected one or two matrices [O, D], got {len(weights)}; concatenate more linears")
    for weight in (*weights, *([] if narrow is None else [narrow])):
        if weight.dim() != 2 or weight.shape[1] != h.shape[-1] or weight.dtype != h.dtype:
            raise ValueError(f"weights: expected {h.dtype} [O, {h.shape[-1]}], got {weight.dtype} {list(weight.shape)}")


class Gradients(NamedTuple):
    """Gradients of the inputs; the last two are empty where there is no such input."""

    h: Tensor
    weight: Tensor
    second: Tensor
    narrow: Tensor


def _form(kernels: bool) -> Any:
    """The module of the norm's kernels, or of the same functions in PyTorch."""
    if kernels:
        from efla_kernels.layers import norm_kernels  # Triton is installed wherever it is chosen

        return norm_kernels
    return norm_torch


def _link(h: Tensor) -> Tensor:
    """See `Stream`."""
    return h.new_zeros(()).expand(h.shape)


def _forward(i: Inputs) -> Outputs:
    r, logits = _form(i.kernels).norm_factors(i.h, i.narrow, i.eps)
    multiply = matmul if i.kernels else torch.mm
    raw_second = i.h.new_empty(0) if i.second is None else multiply(i.h, i.second.t())
    return Outputs(r, logits, _link(i.h), multiply(i.h, i.weight.t()), raw_second)


def _fake(i: Inputs) -> Outputs:
    N = i.h.shape[0]
    return Outputs(
        r=norm_torch.widened(i.h).new_empty(N),
        logits=i.h.new_empty(0) if i.narrow is None else i.h.new_empty(N, i.narrow.shape[0]),
        link=_link(i.h),
        raw=i.h.new_empty(N, i.weight.shape[0]),
        raw_second=i.h.new_empty(0) if i.second is None else i.h.new_empty(N, i.second.shape[0]),
    )


def _keep(i: Inputs, o: Outputs) -> Kept:
    return Kept(i.h, o.r, o.logits, i.weight, i.second, i.narrow, i.kernels)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    h, weight, second, narrow = kept.h, kept.weight, kept.second, kept.narrow
    multiply, add = (matmul, addmm_) if kept.kernels else (torch.mm, Tensor.addmm_)
    if d.raw is None:
        g, d_weight = torch.zeros_like(h, memory_format=torch.contiguous_format), torch.zeros_like(weight)
    else:
        g, d_weight = multiply(d.raw, weight), multiply(d.raw.t(), h)
    d_second, d_narrow = h.new_empty(0), h.new_empty(0)
    if second is not None and d.raw_second is None:
        d_second = torch.zeros_like(second)
    elif second is not None and d.raw_second is not None:
        add(g, d.raw_second, second)
        d_second = multiply(d.raw_second.t(), h)
    dh, scaled = _form(kept.kernels).norm_gradient(g, d, kept)
    if narrow is not None:
        d_narrow = torch.zeros_like(narrow) if scaled is None else scaled.t() @ h
    return Gradients(dh, d_weight, d_second, d_narrow)


def _backward_fake(d: OutputGradients, kept: Kept) -> Gradients:
    h, weight = kept.h, kept.weight
    others = [h.new_empty(0 if w is None else w.shape) for w in (kept.second, kept.narrow)]
    return Gradients(h.new_empty(h.shape), weight.new_empty(weight.shape), *others)


norm_linear_op = register("norm_linear", _forward, _fake, Autograd(_keep, _backward, _backward_fake))
