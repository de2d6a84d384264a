"""Mamba-2 mixer (state-space duality), as published:

z, (x, B, C), dt = split(W_in u);  x, B, C = silu(conv(x, B, C) + bias)
S_t = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t x_t^T,  dt_t = softplus(dt + dt_bias)
y = S^T C + D x;   out = W_out RMSNorm(y * silu(z))
"""

from __future__ import annotations

import efla_kernels
import torch
from torch import Generator, Tensor, nn

from efla_lm.models.cache import LayerState
from efla_lm.models.config import EflaConfig
from efla_lm.models.layers import ShortConvolution, draw_A_log, draw_dt_bias
from efla_lm.models.norm_linear import GatedRMSNorm, Linear, Normed, add_normed_linear, project
from efla_lm.models.sequence import SequenceInfo


class Mamba2Mixer(nn.Module):
    """One Mamba-2 mixer; rows of `in_proj` are z, x, B, C, dt in the order of the published checkpoints."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__()
        self.inner, self.heads, self.head_dim = config.inner_size, config.mamba_heads, config.mamba_head_dim
        self.groups, self.state_size, self.backend = config.num_groups, config.state_size, config.backend
        group_width = self.groups * self.state_size
        self.conv_size = self.inner + 2 * group_width
        self.in_proj = Linear(config.hidden_size, self.inner + self.conv_size + self.heads)
        widths = (self.inner, group_width, group_width)
        self.conv = ShortConvolution(widths, config.conv_size, bias=True, uniform_init=True, backend=config.backend)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(self.heads))
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = GatedRMSNorm(
            self.inner, config.norm_eps, gate_first=True, groups=self.groups, backend=config.backend
        )
        self.out_proj = Linear(self.inner, config.hidden_size)
        self.out_proj.init_scale = config.num_hidden_layers**-0.5  # as published: residual outputs start smaller

    def initial_value(self, name: str, shape: torch.Size, std: float, generator: Generator | None) -> Tensor:
        if name == "D":
            return torch.ones(shape)
        return draw_A_log(shape, 1.0, 16.0, generator) if name == "A_log" else draw_dt_bias(shape, generator)

    @staticmethod
    def flops_per_token(config: EflaConfig, context: int) -> float:
        """4 H N P: update S, and read S^T C."""
        return 4 * config.inner_size * config.state_size

    def forward(self, u: Tensor | Normed, info: SequenceInfo, layer: LayerState | None = None) -> Tensor:
        """[B, T, hidden_size] -> the same; reads and replaces the states of `layer` when there is one."""
        projections = project(u, [self.in_proj]).hide_padding(info)
        z, xbc, dt = projections.wide[0].split((self.inner, self.conv_size, self.heads), dim=-1)
        z, dt = projections.scaled(z), projections.scaled(dt)
        x, B, C, conv_state = self.conv(xbc, None if layer is None else layer.conv, info, projections.row_scale)
        x = x.unflatten(-1, (self.heads, self.head_dim))
        B, C = (t.unflatten(-1, (self.groups, self.state_size)) for t in (B, C))
        A_log, D, dt_bias = self.A_log.float(), self.D.float(), self.dt_bias.float()
        if layer is not None and layer.state is not None and self._decodes(x, info):
            y = efla_kernels.mamba2_step(
                x[:, 0], dt[:, 0], A_log, B[:, 0], C[:, 0], D, dt_bias, layer.state, backend=self.backend
            )
            layer.conv = conv_state.clone()
            return self.out_proj(self.norm(y.flatten(1).unsqueeze(1), z))
        y, state = efla_kernels.mamba2(
            x, dt, A_log, B, C, D, dt_bias,
            dt_mask=info.mask,  # a step of 0 neither writes nor decays; the bias alone would do both
            initial_state=None if layer is None else layer.state,
            output_final_state=layer is not None,
            cu_seqlens=info.cu_seqlens,
            backend=self.backend,
        )  # fmt: skip
        if layer is not None:
            layer.conv, layer.state = conv_state.clone(), state
        return add_normed_linear(u, self.norm, self.out_proj, y.flatten(2), z)

    def _decodes(self, x: Tensor, info: SequenceInfo) -> bool:
        """Whether this pass is one token per sequence that the fused step may serve: no gradient, nothing masked."""
        plain = x.shape[1] == 1 and info.mask is None and info.cu_seqlens is None
        if not plain or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return efla_kernels.fuses_mamba2_step(self.backend, x.device)
