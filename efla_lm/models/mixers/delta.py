"""Mixer of the delta rules: EFLA, Gated EFLA, DeltaNet, Gated DeltaNet.

All four share everything but the op, and the gated two add a decay and an output gate:

    q, k, v = silu(conv(W x));  beta = sigmoid(W_b x);  log g = -exp(A_log) softplus(W_a x + dt_bias)
    S_t = decay (I - erase k k^T) S_{t-1} + write k v^T;   o = S^T q / sqrt(K)
    y = W_o (RMSNorm(o) [* silu(W_g x)])

The op normalises q in all four, k in the DeltaNets only, and derives erase, write and decay from beta, |k|^2 and g.
Two more models stand between DeltaNet and EFLA: their op gets v |k| or v / |k| (`Rule.value_power`).
"""

from __future__ import annotations

from typing import Any

import efla_kernels
import torch
from torch import Tensor, nn

from efla_lm.models.cache import LayerState
from efla_lm.models.config import EflaConfig
from efla_lm.models.layers import Decay, ShortConvolution
from efla_lm.models.norm_linear import GatedRMSNorm, Linear, Normed, Projections, RMSNorm, add_normed_linear, project
from efla_lm.models.sequence import SequenceInfo


class DeltaMixer(nn.Module):
    """One delta-rule mixer; q, k and v are one projection [3 * key_size, hidden_size] and one convolution."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__()
        hidden, heads, width = config.hidden_size, config.num_heads, config.key_size
        self.heads, self.head_dim, self.backend = heads, config.head_dim, config.backend
        self.rule_name, self.norm_eps = str(config.rule.op), config.norm_eps
        self.rule = getattr(efla_kernels, self.rule_name)
        self.qkv_proj = Linear(hidden, 3 * width)
        self.value_power = config.rule.value_power
        # without a decay, and where states are kept, the rule's backward pass does not read v; that of its scale does
        leaves_v = not config.rule.gated and config.backend != "triton_recompute" and self.value_power == 0
        self.qkv_conv = ShortConvolution(
            (width, width, width), config.conv_size, last_apart=leaves_v, backend=config.backend
        )
        self.b_proj = Linear(hidden, heads)
        self.decay: Decay | None = None
        if config.rule.gated:
            self.a_proj = Linear(hidden, heads)
            self.decay = Decay(heads)
        self.g_proj: Linear | None = None
        self.o_norm: RMSNorm | GatedRMSNorm = RMSNorm(config.head_dim, config.norm_eps, config.backend)
        if config.output_gate:
            self.g_proj = Linear(hidden, width)
            self.o_norm = GatedRMSNorm(config.head_dim, config.norm_eps, backend=config.backend)
        self.o_proj = Linear(width, hidden)

    @staticmethod
    def flops_per_token(config: EflaConfig, context: int) -> float:
        """6 H K V: read k^T S, rank-one update, read S^T q. Chunked forms compute more."""
        return 6 * config.key_size * config.head_dim

    def forward(self, x: Tensor | Normed, info: SequenceInfo, layer: LayerState | None = None) -> Tensor:
        """[B, T, hidden_size] -> the same; reads and replaces the states of `layer` when there is one."""
        wide = [self.qkv_proj] if self.g_proj is None else [self.qkv_proj, self.g_proj]
        projections = project(x, wide, [self.b_proj] if self.decay is None else [self.b_proj, self.a_proj])
        if layer is not None and self._decodes(projections.wide[0], info, layer):
            return self._decode(projections, layer)
        projections = projections.hide_padding(info)
        qkv, *gate = projections.wide
        *parts, conv_state = self.qkv_conv(qkv, None if layer is None else layer.conv, info, projections.row_scale)
        # The convolution carries tokens into padding on their right: k = v = 0 there keeps the state as it is.
        q, k, v = (info.hide_padding(part).unflatten(-1, (self.heads, self.head_dim)) for part in parts)
        if self.value_power:
            v = efla_kernels.scaled_values(v, k, self.value_power)
        gates = [projections.narrow[0]]
        if self.decay is not None:
            gates.append(info.hide_padding(self.decay(projections.narrow[1])))  # 0: padding does not decay
        o, state = self.rule(
            q, k, v, *gates,
            initial_state=None if layer is None else layer.state,
            output_final_state=layer is not None,
            cu_seqlens=info.cu_seqlens,
            backend=self.backend,
        )  # fmt: skip
        if layer is not None:
            layer.conv, layer.state = conv_state.clone(), state
        gate = [projections.scaled(g).unflatten(-1, (self.heads, self.head_dim)) for g in gate]
        return add_normed_linear(x, self.o_norm, self.o_proj, o, *gate)

    def _decodes(self, x: Tensor, info: SequenceInfo, layer: LayerState) -> bool:
        """Whether this pass is one token per sequence that the fused step may serve: no gradient, nothing masked."""
        if self.value_power or x.shape[1] != 1 or layer.conv is None or layer.state is None or torch.is_grad_enabled():
            return False
        plain = info.mask is None and info.cu_seqlens is None and not torch.compiler.is_compiling()
        if not plain or self.qkv_conv.weight.device != x.device:  # an offloaded weight comes with its module's call
            return False
        return efla_kernels.fuses_decoding(self.backend, x.device, self.rule_name)

    def _decode(self, projections: Projections, layer: LayerState) -> Tensor:
        """Everything between the projections of one token in one kernel, states in place; [B, 1, hidden_size]."""
        assert layer.conv is not None and layer.state is not None
        qkv, *gate = (x[:, 0] for x in projections.wide)
        logits = [x[:, 0] for x in projections.narrow]
        layer.conv = layer.conv.to(qkv.dtype).contiguous()
        decay: dict[str, Any] = {}
        if self.decay is not None:
            decay = {"decay_logit": logits[1], "A_log": self.decay.A_log, "dt_bias": self.decay.dt_bias}
        output_gate = gate[0].unflatten(-1, (self.heads, self.head_dim)) if gate else None
        y = efla_kernels.decode_step(
            self.rule_name, qkv, layer.conv, self.qkv_conv.weight.to(qkv.dtype), logits[0], layer.state,
            self.o_norm.weight.to(qkv.dtype), output_gate=output_gate, norm_eps=self.norm_eps, backend=self.backend,
            **decay,
        )  # fmt: skip
        return self.o_proj(y.flatten(1)).unsqueeze(1)
