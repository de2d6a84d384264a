"""The RMS norms of `norm_linear` and `unit_norm` in PyTorch's own operations, and what their forms share.

`norm_kernels` has the same four functions on Triton.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """Inputs of the op `norm_linear`."""

    h: Tensor  # [N, D]
    weight: Tensor  # [O, D]
    second: Tensor | None  # [O', D]
    narrow: Tensor | None  # [G, D]
    eps: float
    kernels: bool


class Outputs(NamedTuple):
    """Outputs of the op."""

    r: Tensor  # [N] fp32 (fp64 for fp64)
    logits: Tensor  # [N, G], or empty
    link: Tensor  # [N, D], see `Stream`
    raw: Tensor  # [N, O]
    raw_second: Tensor  # [N, O'], or empty


class OutputGradients(NamedTuple):
    """Gradients that arrive, contiguous; None where the loss does not use the output."""

    link: Tensor | None
    logits: Tensor | None
    raw: Tensor | None
    raw_second: Tensor | None


class Kept(NamedTuple):
    """What the backward pass reads."""

    h: Tensor
    r: Tensor
    logits: Tensor
    weight: Tensor
    second: Tensor | None
    narrow: Tensor | None
    kernels: bool


def widened(x: Tensor) -> Tensor:
    """x in the dtype of its statistics: fp32, or fp64 for fp64."""
    return x if x.dtype.itemsize >= 4 else x.float()


def norm_factors(h: Tensor, narrow: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(r, logits) of h [N, D] and narrow [G, D]; logits are empty without narrow."""
    wide = widened(h)
    r = (wide.square().mean(-1) + eps).rsqrt()
    return r, h.new_empty(0) if narrow is None else (wide @ widened(narrow).t() * r[:, None]).to(h.dtype)


def norm_gradient(g: Tensor, d: OutputGradients, kept: Kept) -> tuple[Tensor, Tensor | None]:
    """(dh, r * d_logits) for g = sum_i d_raw_i W_i [N, D]; None without d_logits."""
    h, r, narrow = widened(kept.h), kept.r, kept.narrow
    g, scaled = widened(g), None
    if narrow is not None and d.logits is not None:
        scaled = (widened(d.logits) * r[:, None]).to(kept.h.dtype)
        g = g + widened(scaled) @ widened(narrow)
    dh = g - h * (r.square() * (g * h).mean(-1))[:, None]
    return (dh if d.link is None else dh + d.link).to(kept.h.dtype), scaled


def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r) of x [N, D]."""
    wide = widened(x)
    r = (wide.square().mean(-1) + eps).rsqrt()
    return (wide * r[:, None]).to(x.dtype), r


def unit_gradient(dy: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """dx of dy, y [N, D] and r [N]."""
    slope, wide = widened(dy), widened(y)
    return ((slope - wide * (slope * wide).mean(-1, keepdim=True)) * r[:, None]).to(y.dtype)
