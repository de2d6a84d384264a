"""Layers that several mixers share: norms, SwiGLU, short convolution, decay parameters.

Dtypes: every layer returns the dtype of its input. Norm statistics, the gate of the gated norm and decays are computed
in fp32, whatever dtype the model has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efla_lm.models.sequence import SequenceInfo


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
        self.uniform_init = False  # see efla_lm.models.init

    def forward(
        self, x: Tensor, state: Tensor | None = None, info: SequenceInfo | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve.

        Args:
            x: [B, T, D].
            state: the W-1 inputs before x, [B, W-1, D]; zeros if None.
            info: tells the documents of a packed batch; a tap never reaches another document.

        Returns:
            y [B, T, D] and the next state [B, W-1, D] (a view of the inputs; clone it to keep it).
        """
        T, gap = x.shape[1], self.weight.shape[1] - 1
        slots = None
        if info is not None and info.segments is not None:
            # Spread the documents apart by W-1 zeros: the same convolution as for separate ones, then gather.
            slots = torch.arange(T, device=x.device) + gap * info.segments
            spread = x.new_zeros(x.shape[0], T + gap * info.documents, x.shape[2])
            padded = spread.index_copy(1, slots + gap, x)
        elif state is None:
            padded = F.pad(x, (0, 0, gap, 0))
        else:
            padded = torch.cat((state.to(x.dtype), x), dim=1)
        if x.is_cuda and slots is None:
            # products and shifts: one kernel forward and few backward once compiled, where cuDNN's depthwise weight
            # gradient is slow
            weight = self.weight.float()
            y = padded[:, :T].float() * weight[:, 0]
            for j in range(1, gap + 1):
                y = y + padded[:, j : j + T].float() * weight[:, j]
            y = y if self.bias is None else y + self.bias.float()
            return F.silu(y).to(x.dtype), padded[:, T:]
        if T == 1 and slots is None:  # decoding: a convolution call costs more than its four products
            y = torch.sum(padded.float() * self.weight.T.float(), dim=1, keepdim=True).to(x.dtype)
            if self.bias is not None:
                y = y + self.bias
        else:
            y = F.conv1d(padded.transpose(1, 2), self.weight[:, None], self.bias, groups=self.weight.shape[0])
            # Contiguous before SiLU: its backward would otherwise walk two layouts at once.
            y = y.transpose(1, 2).contiguous() if slots is None else y.transpose(1, 2).index_select(1, slots)
        return F.silu(y), padded[:, T:]


class Decay(nn.Module):
    """Decay of the gated rules: log g = -exp(A_log) * softplus(a + dt_bias), in fp32."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))

    def forward(self, a: Tensor) -> Tensor:
        """a: [B, T, H] raw projection; returns log g <= 0, [B, T, H] in fp32."""
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
