"""Seeded inputs of `efla_kernels.decode_step`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RULES = ("deltanet", "efla", "gated_deltanet", "gated_efla")


def decode_inputs(
    rule: str,
    gated_norm: bool,
    *,
    batch: int = 2,
    heads: int = 3,
    key_width: int = 8,
    value_width: int = 16,
    taps: int = 4,
    step: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, keyword options) of one step; weights and states are the same for every `step`."""
    fixed, token = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + step)
    D = heads * (2 * key_width + value_width)

    def normal(*shape: int, generator: torch.Generator = fixed) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "conv_state": normal(batch, taps - 1, D).to(dtype),
        "conv_weight": normal(D, taps).to(dtype),
        "state": normal(batch, heads, key_width, value_width).to(
            torch.float64 if dtype == torch.float64 else torch.float32
        ),
        "norm_weight": 1 + 0.1 * normal(value_width).to(dtype),
    }
    A_log, dt_bias = normal(heads), normal(heads)
    tensors["x"] = normal(batch, D, generator=token).to(dtype)
    tensors["beta_logit"] = normal(batch, heads, generator=token).to(dtype)
    options: dict[str, Any] = {}
    if rule.startswith("gated"):
        options["decay_logit"] = normal(batch, heads, generator=token).to(dtype)
        wide = tensors["state"].dtype
        options |= {"A_log": A_log.to(wide), "dt_bias": dt_bias.to(wide)}
    if gated_norm:
        options["output_gate"] = normal(batch, heads, value_width, generator=token).to(dtype)
    return tensors, options
