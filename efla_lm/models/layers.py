"""Layers that several mixers share: SwiGLU, short convolution, decay parameters.

Dtypes: every layer returns the dtype of its input. Decays are computed in fp32, whatever dtype the model has.
"""

from __future__ import annotations

import math

import efla_kernels
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from efla_lm.models.norm_linear import Linear, Normed, plus, project, residual_of, weight_suffices
from efla_lm.models.sequence import SequenceInfo

# Steps dt = softplus(dt_bias) start log-uniform between these, as in Mamba-2 and Gated DeltaNet.
DT_RANGE = (1e-3, 1e-1)
DT_FLOOR = 1e-4


def draw_A_log(shape: torch.Size, low: float, high: float, generator: Generator | None) -> Tensor:
    """A_log with A = exp(A_log) uniform over (low, high]: never log 0."""
    return (high - (high - low) * torch.rand(shape, generator=generator)).log()


def draw_dt_bias(shape: torch.Size, generator: Generator | None) -> Tensor:
    """dt_bias with softplus(dt_bias) log-uniform over `DT_RANGE`."""
    low, high = (math.log(bound) for bound in DT_RANGE)
    dt = (low + (high - low) * torch.rand(shape, generator=generator)).exp().clamp(min=DT_FLOOR)
    return dt + (-torch.expm1(-dt)).log()  # softplus^-1(dt)


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)), without biases; gate and up are one matrix [2 * intermediate, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor | Normed) -> Tensor:
        """[B, T, hidden_size] -> the same; the residual is added to y where x carries one."""
        projections, residual = project(x, [self.gate_up_proj]), residual_of(x)
        (gate_up,), row_scale = projections.wide, projections.row_scale
        if not weight_suffices(self.down_proj, gate_up):
            gate, up = projections.scaled(gate_up).chunk(2, dim=-1)
            return plus(residual, self.down_proj(F.silu(gate) * up))
        weight = self.down_proj.weight.to(gate_up.dtype)
        return efla_kernels.swiglu_linear(gate_up, weight, row_scale=row_scale, residual=residual, backend=self.backend)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution followed by SiLU over the channels of one or several tensors side by side.

    `efla_kernels.short_convolution` has the equation. `widths` are the channels of each tensor. `last_apart`: the
    backward pass of what follows does not read the last tensor. Weights start N(0, std^2), which trains the delta rules
    clearly faster than torch's uniform +-1/sqrt(size) (`uniform_init`, as published for Mamba-2), and Mamba-2 as well.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        size: int,
        *,
        bias: bool = False,
        last_apart: bool = False,
        uniform_init: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.widths, self.last_apart, self.backend = widths, last_apart, backend
        self.weight = nn.Parameter(torch.empty(sum(widths), size))
        self.bias = nn.Parameter(torch.zeros(sum(widths))) if bias else None
        self.uniform_init = uniform_init

    def initial_value(self, name: str, shape: torch.Size, std: float, generator: Generator | None) -> Tensor:
        if not self.uniform_init:
            return torch.empty(shape).normal_(0.0, std, generator=generator)
        bound = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        info: SequenceInfo | None = None,
        row_scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Convolve.

        Args:
            x: [B, T, D], D the sum of `widths`.
            state: the W-1 inputs before x, [B, W-1, D]; zeros if None.
            info: says which documents a packed batch holds; the kernel never reaches into another document.
            row_scale: fp32 [B, T], row t of x is multiplied by it (`Projections`); states are stored unscaled.

        Returns:
            One tensor [B, T, width] for each of `widths`, then the next state [B, W-1, D] (a view of the inputs; clone
            it to keep it).
        """
        parts = efla_kernels.short_convolution(
            x, self.weight, self.bias, widths=self.widths, state=state,
            cu_seqlens=None if info is None else info.cu_seqlens, row_scale=row_scale, last_apart=self.last_apart,
            backend=self.backend,
        )  # fmt: skip
        return *parts, efla_kernels.convolution_state(x, self.weight.shape[1], state)


class Decay(nn.Module):
    """Decay of the gated rules: log g = -exp(A_log) * softplus(a + dt_bias), in fp32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))

    def initial_value(self, name: str, shape: torch.Size, std: float, generator: Generator | None) -> Tensor:
        return draw_A_log(shape, 0.0, 16.0, generator) if name == "A_log" else draw_dt_bias(shape, generator)

    def forward(self, a: Tensor) -> Tensor:
        """a: [B, T, H] raw projection; returns log g <= 0, [B, T, H] in fp32."""
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
