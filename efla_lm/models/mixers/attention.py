"""Causal softmax attention with rotary positions: the Transformer baseline."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efla_lm.models.cache import LayerState
from efla_lm.models.config import EflaConfig
from efla_lm.models.norm_linear import Linear, Normed, add_linear, project
from efla_lm.models.rotary import rotate
from efla_lm.models.sequence import SequenceInfo


class AttentionMixer(nn.Module):
    """o = softmax(q k^T / sqrt(K), causal) v, q and k rotated by their positions; torch picks the SDPA kernel."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__()
        if config.backend not in ("auto", "torch"):
            raise ValueError(f"attention runs on torch's SDPA: backend must be auto or torch, got {config.backend!r}")
        self.heads, self.head_dim, self.backend = config.num_heads, config.head_dim, config.backend
        self.qkv_proj = Linear(config.hidden_size, 3 * config.key_size)
        self.o_proj = Linear(config.key_size, config.hidden_size)

    @staticmethod
    def flops_per_token(config: EflaConfig, context: int) -> float:
        """2 H K context: scores and values over context / 2 visible keys on average."""
        return 2 * config.key_size * context

    def forward(self, x: Tensor | Normed, info: SequenceInfo, layer: LayerState | None = None) -> Tensor:
        """[B, T, hidden_size] -> the same; reads and extends the keys and values of `layer` if there is one."""
        if info.rotary is None:
            raise ValueError("attention needs SequenceInfo.for_attention(...)")
        projections = project(x, [self.qkv_proj])
        qkv = projections.scaled(*projections.wide)
        q, k, v = qkv.unflatten(-1, (3, self.heads, self.head_dim)).unbind(2)
        q, k = rotate(q, info.rotary), rotate(k, info.rotary)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if layer is not None:
            if layer.keys is not None and layer.values is not None:
                k, v = torch.cat((layer.keys, k), dim=2), torch.cat((layer.values, v), dim=2)
            layer.keys, layer.values = k, v
        causal = info.visible is None and info.past == 0
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=info.visible, is_causal=causal)
        return add_linear(x, self.o_proj, o.transpose(1, 2).flatten(2), self.backend)
