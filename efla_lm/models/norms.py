"""Norms, and the linear maps that read their results.

Where gradients are wanted a norm is not a pass of its own. Its weight goes into the maps behind it, W diag(weight), and
its factors, one for each row, are left to whoever reads what the maps give (`efla_kernels.norm_linear`). Nor is the sum
at the end of a mixer or an MLP: the last product is added to the stream as it is written. Everywhere else a norm is a
norm, a map is a map and a sum a sum. `project_normed` in front of a mixer or an MLP, and `project_back` and `added` at
its end, are the places that know the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import efla_kernels
import torch
import torch.nn.functional as F
from efla_kernels import Stream
from torch import Tensor, nn

from efla_lm.models.sequence import SequenceInfo

FUSED_DTYPES = (torch.bfloat16, torch.float32)  # fp16 overflows in products of rows that are not normed yet


class Linear(nn.Linear):
    """y = x W^T, W cast to x's dtype: where one device trains, fp32 masters are used in bf16 (`EflaModel.compute`)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, backend: str = "auto") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.backend = eps, backend

    def forward(self, x: Tensor) -> Tensor:
        # torch computes the statistics of 16-bit inputs in fp32 itself.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def unweighted(self, x: Tensor) -> Tensor:
        """y without the weight, in training."""
        return efla_kernels.unit_rms_norm(x, eps=self.eps, backend=self.backend)


class GatedRMSNorm(nn.Module):
    """Output norm of the gated mixers, over the last dimension or over groups of it.

    Gated DeltaNet (gate_first=False): y = RMSNorm(x) * weight * silu(gate).
    Mamba-2 (gate_first=True):         y = RMSNorm(x * silu(gate)) * weight, statistics per group.
    """

    def __init__(self, size: int, eps: float, gate_first: bool = False, groups: int = 1, backend: str = "auto") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.backend = eps, backend
        self.gate_first = gate_first
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate: [..., size]."""
        return self._normed(x, gate, self.weight)

    def unweighted(self, x: Tensor, gate: Tensor) -> Tensor:
        """y without the weight, in training."""
        return self._normed(x, gate, None)

    def _normed(self, x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        dtype = x.dtype
        gate = F.silu(gate.float())
        x = x.float() * gate if self.gate_first else x.float()
        x = F.rms_norm(x.unflatten(-1, (self.groups, -1)), (x.shape[-1] // self.groups,), eps=self.eps).flatten(-2)
        x = x if weight is None else x * weight.float()
        return (x if self.gate_first else x * gate).to(dtype)


class Maps(NamedTuple):
    """The linear maps that read a norm's result: one or two wide ones, and those of a few rows, which gates need."""

    wide: Sequence[nn.Module]
    narrow: Sequence[nn.Module] = ()


class Projected(NamedTuple):
    """What `Maps` gave, and the stream that they read.

    Attributes:
        stream: h [B, T, D], to which the result of what follows is added (`added`).
        wide: [B, T, O] of each wide map, whose rows `scale` is still to be multiplied by.
        narrow: [B, T, G] of each narrow map, complete.
        scale: fp32 [B, T], a constant to autograd; None: 1.
    """

    stream: Tensor | Stream
    wide: tuple[Tensor, ...]
    narrow: tuple[Tensor, ...] = ()
    scale: Tensor | None = None

    def scaled(self, x: Tensor) -> Tensor:
        """x, a part of `wide`, times its rows' factors; torch.compile makes it a part of what follows."""
        return x if self.scale is None else (x * self.scale[..., None]).to(x.dtype)

    def hide_padding(self, info: SequenceInfo) -> Projected:
        """The same with zeros on padding."""
        hide = info.hide_padding
        narrow = tuple(hide(x) for x in self.narrow)
        if self.scale is None:
            return Projected(self.stream, tuple(hide(x) for x in self.wide), narrow)
        return Projected(self.stream, self.wide, narrow, hide(self.scale))


def at_hand(weight: Tensor, x: Tensor) -> bool:
    """Whether a module's weight can be used beside its forward: offloaded, it comes to x's device for that alone."""
    return weight.device == x.device


def is_bare(module: nn.Module, x: Tensor) -> bool:
    """Whether a map or a norm may be used by its weight alone, uncalled, for x.

    Not where a user has put something else in its place (adapters, quantised weights, other norms), where hooks wait
    for its call (pruning and the older weight norm make the weight in one), or where its weight is offloaded.
    """
    if type(module) not in (Linear, RMSNorm, GatedRMSNorm):
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return at_hand(module.weight, x)  # type: ignore[arg-type]


def plus(stream: Tensor | Stream, update: Tensor) -> Tensor:
    """stream + update."""
    return stream.plus(update) if isinstance(stream, Stream) else stream + update


def added(stream: Tensor | Stream, linear: nn.Module, x: Tensor, backend: str = "auto") -> Tensor:
    """stream + `linear` of x."""
    if isinstance(stream, Stream) and is_bare(linear, x):
        return efla_kernels.linear(x, linear.weight.to(x.dtype), onto=stream, backend=backend)  # type: ignore[arg-type]
    return plus(stream, linear(x))


def project_normed(norm: RMSNorm, maps: Maps, hidden: Tensor, cached: bool = False) -> Projected:
    """`maps` of norm(hidden) [B, T, D]. cached: states will outlive the pass, so that what they are made of must be
    complete."""
    linears = [*maps.wide, *maps.narrow]
    plain = cached or hidden.dtype not in FUSED_DTYPES or torch.is_autocast_enabled(hidden.device.type)
    if plain or not _folds(norm, linears, hidden):
        normed = norm(hidden)
        return Projected(hidden, tuple(f(normed) for f in maps.wide), tuple(f(normed) for f in maps.narrow))
    wide = [_folded(norm, f, hidden.dtype) for f in maps.wide]
    narrow = [_folded(norm, f, hidden.dtype) for f in maps.narrow]
    joined = torch.cat(narrow) if len(narrow) > 1 else next(iter(narrow), None)
    stream, raws, scale, logits = efla_kernels.norm_linear(hidden, wide, joined, eps=norm.eps, backend=norm.backend)
    if logits is None:
        return Projected(stream, raws, (), scale)
    parts = logits.split([weight.shape[0] for weight in narrow], -1) if len(narrow) > 1 else (logits,)
    return Projected(stream, raws, tuple(parts), scale)


def project_back(
    stream: Tensor | Stream, norm: RMSNorm | GatedRMSNorm, linear: nn.Module, x: Tensor, *gate: Tensor
) -> Tensor:
    """stream [B, T, D] + `linear` of norm(x, *gate), heads side by side: x [B, T, H, V]."""
    if not _folds(norm, [linear], x):
        return plus(stream, linear(norm(x, *gate).flatten(2)))
    y, weight = norm.unweighted(x, *gate).flatten(2), _folded(norm, linear, x.dtype)
    return efla_kernels.linear(y, weight, onto=stream, backend=norm.backend)


def _folds(norm: RMSNorm | GatedRMSNorm, linears: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether the norm's weight goes into `linears`: for its gradient, a sum over their weights instead of one more
    pass over all tokens. Where one of them must be called (`is_bare`), all are, and get the norm's result."""
    return torch.is_grad_enabled() and all(is_bare(module, x) for module in (norm, *linears))


def _folded(norm: RMSNorm | GatedRMSNorm, linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """W diag(weight), the weight repeated over heads."""
    assert isinstance(linear, Linear)
    weight = linear.weight.unflatten(1, (-1, norm.weight.numel())) * norm.weight
    return weight.flatten(1).to(dtype)
