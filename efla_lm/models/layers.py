"""Layers that several mixers share: norms, SwiGLU, short convolution, rotary embedding, decay parameters.

Dtypes: every layer returns the dtype of its input. Norm statistics, the gate of the gated norm and decays are computed
in fp32, whatever dtype the model has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # torch computes the statistics of 16-bit inputs in fp32 itself.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


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
        dtype = x.dtype
        gate = F.silu(gate.float())
        x = x.float() * gate if self.gate_first else x.float()
        x = F.rms_norm(x.unflatten(-1, (self.groups, -1)), (x.shape[-1] // self.groups,), eps=self.eps).flatten(-2)
        x = x * self.weight.float()
        return (x if self.gate_first else x * gate).to(dtype)


class SwiGLU(nn.Module):
    """y = down(silu(gate(x)) * up(x)), without biases; gate and up are one matrix [2 * intermediate, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class ShortConvolution(nn.Module):
    """Causal depthwise convolution followed by SiLU: y_t = silu(bias + sum_j weight[:, W-1-j] * x_{t-j}), j < W.

    The last tap multiplies the current token, as in torch's Conv1d with left padding. Tokens before the start of the
    sequence (or of its segment) count as zeros.
    """

    def __init__(self, channels: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        # Outside of our own initialisation (a bare layer in a test or a notebook) the values must still be sane.
        nn.init.uniform_(self.weight, -(size**-0.5), size**-0.5)

    def forward(
        self, x: Tensor, state: Tensor | None = None, segments: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve.

        Args:
            x: [B, T, D].
            state: the W-1 inputs before x, [B, W-1, D]; zeros if None.
            segments: [T] document index of each token in a packed batch (B = 1); a tap never reaches another document.

        Returns:
            y [B, T, D] and the next state [B, W-1, D] (a view of the inputs; clone it to keep it).
        """
        T, W = x.shape[1], self.weight.shape[1]
        padded = F.pad(x, (0, 0, W - 1, 0)) if state is None else torch.cat((state.to(x.dtype), x), dim=1)
        if segments is None:
            y = F.conv1d(padded.transpose(1, 2), self.weight[:, None], self.bias, groups=self.weight.shape[0])
            y = y.transpose(1, 2)
        else:
            y = self._segmented(padded, segments, T, W)
        return F.silu(y), padded[:, T:]

    def _segmented(self, padded: Tensor, segments: Tensor, T: int, W: int) -> Tensor:
        y = padded[:, W - 1 :] * self.weight[:, W - 1]
        for j in range(1, W):
            same = F.pad(segments[j:] == segments[: T - j], (min(j, T), 0))[:T]
            y = y + padded[:, W - 1 - j : W - 1 - j + T] * same[None, :, None] * self.weight[:, W - 1 - j]
        return y if self.bias is None else y + self.bias


class Decay(nn.Module):
    """Decay parameters of Gated DeltaNet: log g = -exp(A_log) * softplus(a + dt_bias), in fp32.

    A module of its own so that a sharded model can keep these few numbers in fp32 while the rest computes in bf16.
    """

    A_RANGE = (0.0, 16.0)  # A = exp(A_log) starts uniform in (0, 16], as in Gated DeltaNet

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))

    def forward(self, a: Tensor) -> Tensor:
        """a: [B, T, H] raw projection; returns log g <= 0, [B, T, H] in fp32."""
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())


class StateSpaceParameters(nn.Module):
    """Mamba-2's per-head parameters A_log, dt_bias and the skip D, handed out in fp32."""

    A_RANGE = (1.0, 16.0)  # A starts uniform in [1, 16], as in Mamba-2

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.A_log.float(), self.dt_bias.float(), self.D.float()


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, fp32 [..., T, 1, head_dim / 2] for positions [..., T].

    Angle i of position p is p * theta^(-2i / head_dim). Computed on the fly: no buffer that a model built on the meta
    device could lose.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i + K/2}) of x [B, T, H, K] by the angles of `rotary_tables`."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
