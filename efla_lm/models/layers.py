"""Layers that several mixers share: linear maps, norms, SwiGLU, short convolution, decay parameters.

Dtypes: every layer returns the dtype of its input. Norm statistics, the gate of the gated norm and decays are computed
in fp32, whatever dtype the model has.
"""

from __future__ import annotations

import efla_kernels
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efla_lm.models.sequence import SequenceInfo


class Linear(nn.Linear):
    """y = x W^T, W cast to x's dtype: where one device trains, fp32 masters are used in bf16 (`EflaModel.compute`)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """x [..., inputs]; with `gain`, [inputs] or [n] for each n of them in turn, y = x (W diag(gain))^T: what
        `RMSNorm.apart` leaves to do."""
        weight = self.weight
        if gain is not None:
            weight = (weight.unflatten(1, (-1, gain.numel())) * gain).flatten(1)
        return F.linear(x, weight.to(x.dtype))


def project(linear: nn.Module, x: Tensor, gain: Tensor | None) -> Tensor:
    """`linear` of the norm's result that `RMSNorm.apart` gave as x and gain.

    Adapters and quantised weights stand in the place of a `Linear` where a user puts them: those get the result itself.
    """
    if gain is None:
        return linear(x)
    if type(linear) is Linear:
        return linear(x, gain)
    return linear((x.unflatten(-1, (-1, gain.numel())) * gain.to(x.dtype)).flatten(-2))


def at_hand(weight: Tensor, x: Tensor) -> bool:
    """Whether a module's weight can be used beside its forward: offloaded, it comes to x's device for that alone."""
    return weight.device == x.device


def folds(weight: Tensor, x: Tensor) -> bool:
    """Whether a norm leaves its weight to the products behind it: for its gradient alone, as to scale W costs a single
    token more than to scale it."""
    return torch.is_grad_enabled() and at_hand(weight, x)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    A norm whose result goes into linear maps alone is used by `apart`: the weight's gradient is then a sum over their
    weights, where it would be another pass over all tokens.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # torch computes the statistics of 16-bit inputs in fp32 itself.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(y, gain) for `project`: y * gain is the norm's result. Where the weight does not fold it is y itself, and
        gain None."""
        if not folds(self.weight, x):
            return self(x), None
        return F.rms_norm(x, self.weight.shape, None, self.eps), self.weight


class GatedRMSNorm(nn.Module):
    """Output norm of the gated mixers, over the last dimension or over groups of it.

    Gated DeltaNet (gate_first=False): y = RMSNorm(x) * weight * silu(gate).
    Mamba-2 (gate_first=True):         y = RMSNorm(x * silu(gate)) * weight, statistics per group.
    """

    def __init__(self, size: int, eps: float, gate_first: bool = False, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self.gate_first = gate_first
        self.groups = groups

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate: [..., size]."""
        return self._normed(x, gate, self.weight)

    def apart(self, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `RMSNorm.apart`."""
        if not folds(self.weight, x):
            return self(x, gate), None
        return self._normed(x, gate, None), self.weight

    def _normed(self, x: Tensor, gate: Tensor, weight: Tensor | None) -> Tensor:
        dtype = x.dtype
        gate = F.silu(gate.float())
        x = x.float() * gate if self.gate_first else x.float()
        x = F.rms_norm(x.unflatten(-1, (self.groups, -1)), (x.shape[-1] // self.groups,), eps=self.eps).flatten(-2)
        x = x if weight is None else x * weight.float()
        return (x if self.gate_first else x * gate).to(dtype)


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)), without biases; gate and up are one matrix [2 * intermediate, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """x [..., hidden_size]; x and gain as `project` takes them."""
        gate_up = project(self.gate_up_proj, x, gain)
        if type(self.down_proj) is Linear and at_hand(self.down_proj.weight, x):
            weight = self.down_proj.weight.to(gate_up.dtype)
            return efla_kernels.swiglu_linear(gate_up, weight, backend=self.backend)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution followed by SiLU over the channels of one or several tensors side by side.

    `efla_kernels.short_convolution` has the equation and the forms; `widths` are the channels of each tensor,
    `last_apart` says that the last one is not read by what follows in its backward pass.
    """

    def __init__(
        self, widths: tuple[int, ...], size: int, bias: bool = False, last_apart: bool = False, backend: str = "auto"
    ) -> None:
        super().__init__()
        self.widths, self.last_apart, self.backend = widths, last_apart, backend
        self.weight = nn.Parameter(torch.empty(sum(widths), size))
        self.bias = nn.Parameter(torch.zeros(sum(widths))) if bias else None
        self.uniform_init = False  # see efla_lm.models.init

    def forward(self, x: Tensor, state: Tensor | None = None, info: SequenceInfo | None = None) -> tuple[Tensor, ...]:
        """Convolve.

        Args:
            x: [B, T, D], D the sum of `widths`.
            state: the W-1 inputs before x, [B, W-1, D]; zeros if None.
            info: tells the documents of a packed batch; a tap never reaches another document.

        Returns:
            One tensor [B, T, width] for each of `widths`, then the next state [B, W-1, D] (a view of the inputs; clone
            it to keep it).
        """
        parts = efla_kernels.short_convolution(
            x, self.weight, self.bias, widths=self.widths, state=state,
            cu_seqlens=None if info is None else info.cu_seqlens, last_apart=self.last_apart, backend=self.backend,
        )  # fmt: skip
        return *parts, efla_kernels.convolution_state(x, self.weight.shape[1], state)


class Decay(nn.Module):
    """Decay of the gated rules: log g = -exp(A_log) * softplus(a + dt_bias), in fp32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))

    def forward(self, a: Tensor) -> Tensor:
        """a: [B, T, H] raw projection; returns log g <= 0, [B, T, H] in fp32."""
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
