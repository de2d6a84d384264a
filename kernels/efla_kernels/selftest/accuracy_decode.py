"""Seeded inputs of the decoding step and its errors against float64: `accuracy.Case` for single tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from efla_kernels.delta_rule.decode import decode_step

TAPS = 4
STEPS = 3  # states move on in place: the second and third step read what the one before has written


@dataclass(frozen=True)
class DecodeCase:
    """Shape and type of a few decoding steps; `op` is the rule. The gated rules have a gated output norm."""

    op: str
    dtype: torch.dtype = torch.bfloat16
    batch: int = 3
    heads: int = 4
    key_width: int = 128
    value_width: int = 128
    tokens: int = 1

    def inputs(self, seed: int, device: torch.device | str) -> dict[str, Tensor]:
        """`decode_step`'s tensors by argument name; what changes with the token has STEPS rows in front."""
        generator = torch.Generator().manual_seed(seed)
        B, H, K, V = self.batch, self.heads, self.key_width, self.value_width
        D = H * (2 * K + V)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        tensors = {
            "x": normal(STEPS, B, D).to(self.dtype),
            "beta_logit": normal(STEPS, B, H).to(self.dtype),
            "conv_state": normal(B, TAPS - 1, D).to(self.dtype),
            "conv_weight": (normal(D, TAPS) / TAPS**0.5).to(self.dtype),
            "norm_weight": (1 + 0.1 * normal(V)).to(self.dtype),
            "state": normal(B, H, K, V),
        }
        if self.op.startswith("gated"):
            tensors |= {
                "decay_logit": normal(STEPS, B, H).to(self.dtype),
                "output_gate": normal(STEPS, B, H, V).to(self.dtype),
                "A_log": normal(H),
                "dt_bias": normal(H) - 2,
            }
        return {name: x.to(device) for name, x in tensors.items()}

    def run(self, tensors: dict[str, Tensor], backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Outputs of all steps and both states after them."""
        own = {name: x.to(dtype or x.dtype, copy=True) for name, x in tensors.items()}
        per_token = ("x", "beta_logit", "decay_logit", "output_gate")
        outputs = []
        for t in range(STEPS):
            arguments: dict[str, Any] = {n: x[t] if n in per_token else x for n, x in own.items()}
            outputs.append(decode_step(self.op, **arguments, backend=backend))
        return {"o": torch.stack(outputs), "state": own["state"], "conv_state": own["conv_state"]}

    def truth(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same in float64 from the rounded inputs."""
        return self.run(tensors, "torch", torch.float64)
