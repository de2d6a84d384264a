"""RMSNorm, the linears behind it, and the residual sum around them.

A block is h = h + branch(norm(h)), once with its mixer and once with its MLP. In inference the modules run one after
the other. In training three passes over [B, T, D] are left out:

* Norm into linears: with r_t = 1 / rms(h_t), W norm(h)_t = r_t (W diag(weight)) h_t. The linears read h itself, the
  norm's weight is folded into W, and the row scale r is passed on to the consumer (`efla_kernels.norm_linear`).
* Output norm into output linear: the norm's weight is folded into W in the same way.
* Residual into output linear: the last matmul of the branch adds h as it writes its result.

`add_branch` decides. A mixer or an MLP is x -> y either way: it reads x by `project` and ends with `add_linear` or
`add_normed_linear`. For x a `Tensor`, y is the branch's result. For x a `Normed`, y has the residual added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import efla_kernels
import torch
import torch.nn.functional as F
from efla_kernels import Stream
from torch import Generator, Tensor, nn

from efla_lm.models.sequence import SequenceInfo

FUSED_DTYPES = (torch.bfloat16, torch.float32)  # in fp16 a matmul of rows that are not normed overflows


class Linear(nn.Linear):
    """y = x W^T, W cast to x's dtype: where one device trains, fp32 masters are used in bf16 (`EflaModel.compute`)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.init_scale = 1.0  # of the initial standard deviation

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float, backend: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.backend = eps, backend

    def initial_value(self, name: str, shape: torch.Size, std: float, generator: Generator | None) -> Tensor:
        return torch.ones(shape)


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, backend: str = "auto") -> None:
        super().__init__(size, eps, backend)

    def forward(self, x: Tensor) -> Tensor:
        # torch computes the statistics of 16-bit inputs in fp32 itself.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def unweighted(self, x: Tensor) -> Tensor:
        """y without the weight, for training."""
        return efla_kernels.unit_rms_norm(x, eps=self.eps, backend=self.backend)


class GatedRMSNorm(_Norm):
    """Output norm of the gated mixers, over the last dimension or over groups of it.

    Gated DeltaNet (gate_first=False): y = RMSNorm(x) * weight * silu(gate).
    Mamba-2 (gate_first=True):         y = RMSNorm(x * silu(gate)) * weight, statistics per group.
    """

    def __init__(self, size: int, eps: float, gate_first: bool = False, groups: int = 1, backend: str = "auto") -> None:
        super().__init__(size, eps, backend)
        self.gate_first, self.groups = gate_first, groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate: [..., size]."""
        return self._normed(x, gate, self.weight)

    def unweighted(self, x: Tensor, gate: Tensor) -> Tensor:
        """y without the weight, for training."""
        return self._normed(x, gate, None)

    def _normed(self, x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        dtype = x.dtype
        gate = F.silu(gate.float())
        x = x.float() * gate if self.gate_first else x.float()
        x = F.rms_norm(x.unflatten(-1, (self.groups, -1)), (x.shape[-1] // self.groups,), eps=self.eps).flatten(-2)
        x = x if weight is None else x * weight.float()
        return (x if self.gate_first else x * gate).to(dtype)


class Normed:
    """norm(h) in training, before it is known whether it must be computed: the linears that read it may fold it.

    Attributes:
        norm, h: the norm and its input [B, T, D].
        residual: h, to which the branch adds its result. After a fused `project` it is the `Stream` by which the
            gradients of h's two readers are summed in one kernel.
    """

    def __init__(self, norm: RMSNorm, h: Tensor) -> None:
        self.norm, self.h = norm, h
        self.residual: Tensor | Stream = h


class Projections(NamedTuple):
    """Results of the linears behind a norm.

    Attributes:
        wide: [B, T, O] of each wide linear; the consumer multiplies row t by `row_scale`.
        narrow: [B, T, G] of each narrow linear (one number per head, for gates), complete.
        row_scale: fp32 [B, T], without gradient; None: 1.
    """

    wide: tuple[Tensor, ...]
    narrow: tuple[Tensor, ...] = ()
    row_scale: Tensor | None = None

    def scaled(self, x: Tensor) -> Tensor:
        """x, a part of `wide`, times the row scale; torch.compile fuses it with what follows."""
        return x if self.row_scale is None else (x * self.row_scale[..., None]).to(x.dtype)

    def hide_padding(self, info: SequenceInfo) -> Projections:
        """The same with zeros on padding."""
        hide = info.hide_padding
        narrow = tuple(hide(x) for x in self.narrow)
        if self.row_scale is None:
            return Projections(tuple(hide(x) for x in self.wide), narrow)
        return Projections(self.wide, narrow, hide(self.row_scale))


def add_branch(h: Tensor, norm: nn.Module, branch: nn.Module, *context: Any, fuse: bool = True) -> Tensor:
    """h + branch(norm(h), *context), [B, T, D].

    fuse: False where the branch fills a cache, whose states are made of complete projections.
    """
    fuse = fuse and torch.is_grad_enabled() and h.dtype in FUSED_DTYPES
    if fuse and not torch.is_autocast_enabled(h.device.type) and weight_suffices(norm, h):
        return branch(Normed(norm, h), *context)  # type: ignore[arg-type]
    return h + branch(norm(h), *context)


def project(x: Tensor | Normed, wide: Sequence[nn.Module], narrow: Sequence[nn.Module] = ()) -> Projections:
    """One or two wide linears, and any number of narrow ones, of x [B, T, D]."""
    if isinstance(x, Normed):
        if all(weight_suffices(linear, x.h) for linear in (*wide, *narrow)):
            return _project_fused(x, wide, narrow)
        x = x.norm(x.h)
    return Projections(tuple(linear(x) for linear in wide), tuple(linear(x) for linear in narrow))


def add_linear(x: Tensor | Normed, linear: nn.Module, y: Tensor, backend: str = "auto") -> Tensor:
    """linear(y) of a branch whose input is x, the residual added where x carries one."""
    residual = residual_of(x)
    if isinstance(residual, Stream) and weight_suffices(linear, y):
        return efla_kernels.linear(y, linear.weight.to(y.dtype), residual=residual, backend=backend)  # type: ignore[arg-type]
    return plus(residual, linear(y))


def add_normed_linear(
    x: Tensor | Normed, norm: RMSNorm | GatedRMSNorm, linear: nn.Module, y: Tensor, *gate: Tensor
) -> Tensor:
    """linear(norm(y, *gate)) as `add_linear`, heads side by side: y and gate [B, T, H, V]."""
    residual = residual_of(x)
    if not (torch.is_grad_enabled() and weight_suffices(norm, y) and weight_suffices(linear, y)):
        return plus(residual, linear(norm(y, *gate).flatten(2)))
    unit, weight = norm.unweighted(y, *gate).flatten(2), _folded(norm, linear, y.dtype)
    return efla_kernels.linear(unit, weight, residual=residual, backend=norm.backend)


def residual_of(x: Tensor | Normed) -> Tensor | Stream | None:
    """What a branch with input x adds its result to; None: its caller adds it."""
    return x.residual if isinstance(x, Normed) else None


def plus(residual: Tensor | Stream | None, y: Tensor) -> Tensor:
    """residual + y."""
    if residual is None:
        return y
    return residual.add(y) if isinstance(residual, Stream) else residual + y


def weight_suffices(module: nn.Module, x: Tensor) -> bool:
    """Whether a kernel may use the module's weight for x in place of a call of the module.

    The module must be called if it is an adapter, quantised, or another norm; if it has hooks (pruning and the older
    weight norm make the weight in one); and if its weight is offloaded, since its call loads the weight.
    """
    if type(module) not in (Linear, RMSNorm, GatedRMSNorm):
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return module.weight.device == x.device


def _project_fused(x: Normed, wide: Sequence[nn.Module], narrow: Sequence[nn.Module]) -> Projections:
    weights = [_folded(x.norm, linear, x.h.dtype) for linear in wide]
    small = [_folded(x.norm, linear, x.h.dtype) for linear in narrow]
    joined = torch.cat(small) if len(small) > 1 else next(iter(small), None)
    x.residual, raws, row_scale, logits = efla_kernels.norm_linear(
        x.h, weights, joined, eps=x.norm.eps, backend=x.norm.backend
    )
    if logits is None:
        return Projections(raws, (), row_scale)
    parts = logits.split([weight.shape[0] for weight in small], -1) if len(small) > 1 else (logits,)
    return Projections(raws, tuple(parts), row_scale)


def _folded(norm: RMSNorm | GatedRMSNorm, linear: nn.Module, dtype: torch.dtype) -> Tensor:
    """W diag(weight), the weight repeated over heads."""
    assert isinstance(linear, Linear)
    weight = linear.weight.unflatten(1, (-1, norm.weight.numel())) * norm.weight
    return weight.flatten(1).to(dtype)
