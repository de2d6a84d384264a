"""Layers that several mixers share: SwiGLU, short convolution, decay parameters.

Dtypes: every layer returns the dtype of its input. Norm statistics, the gate of the gated norm (`efla_lm.models.norms`)
and decays are computed in fp32, whatever dtype the model has.
"""

from __future__ import annotations

import efla_kernels
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efla_lm.models.norms import Linear, Maps, Projected, is_bare, plus
from efla_lm.models.sequence import SequenceInfo


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)), without biases; gate and up are one matrix [2 * intermediate, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, backend: str = "auto") -> None:
        super().__init__()
        self.backend = backend
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def maps(self) -> Maps:
        """What reads the norm before it."""
        return Maps([self.gate_up_proj])

    def forward(self, projected: Projected) -> Tensor:
        """What `maps` gave -> the stream with the result added, [..., hidden_size]."""
        (gate_up,), stream = projected.wide, projected.stream
        if not is_bare(self.down_proj, gate_up):
            gate, up = projected.scaled(gate_up).chunk(2, dim=-1)
            return plus(stream, self.down_proj(F.silu(gate) * up))
        weight, scale = self.down_proj.weight.to(gate_up.dtype), projected.scale
        return efla_kernels.swiglu_linear(gate_up, weight, row_scale=scale, onto=stream, backend=self.backend)


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

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        info: SequenceInfo | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Convolve.

        Args:
            x: [B, T, D], D the sum of `widths`.
            state: the W-1 inputs before x, [B, W-1, D]; zeros if None.
            info: tells the documents of a packed batch; a tap never reaches another document.
            scale: fp32 [B, T], factors of x's rows (`Projected`); the states are without them.

        Returns:
            One tensor [B, T, width] for each of `widths`, then the next state [B, W-1, D] (a view of the inputs; clone
            it to keep it).
        """
        parts = efla_kernels.short_convolution(
            x, self.weight, self.bias, widths=self.widths, state=state,
            cu_seqlens=None if info is None else info.cu_seqlens, row_scale=scale, last_apart=self.last_apart,
            backend=self.backend,
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
