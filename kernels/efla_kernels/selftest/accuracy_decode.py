"""Cases of the delta rules' decoding step: three tokens, each of which reads the states that the one before wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from efla_kernels.delta_rule.decode import decode_step
from efla_kernels.selftest.accuracy import BF16, Checked, Draw, Tensors

KERNEL_SIZE = 4
STEPS = 3
PER_TOKEN = ("x", "beta_logit", "decay_logit", "output_gate")  # have STEPS rows in front


@dataclass(frozen=True)
class DecodeCase(Checked):
    """Shape and type of a few decoding steps; `op` is the rule. The gated rules have a gated output norm."""

    op: str
    dtype: torch.dtype = BF16
    batch: int = 3
    heads: int = 4
    key_width: int = 128
    value_width: int = 128
    tokens: int = 1

    def inputs(self, seed: int, device: torch.device | str) -> Tensors:
        """`decode_step`'s tensors by argument name."""
        normal, B, H, K, V = Draw(seed).normal, self.batch, self.heads, self.key_width, self.value_width
        D = H * (2 * K + V)
        tensors = {
            "x": normal(STEPS, B, D).to(self.dtype),
            "beta_logit": normal(STEPS, B, H).to(self.dtype),
            "conv_state": normal(B, KERNEL_SIZE - 1, D).to(self.dtype),
            "conv_weight": (normal(D, KERNEL_SIZE) / KERNEL_SIZE**0.5).to(self.dtype),
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

    def run(self, tensors: Tensors, backend: str, dtype: torch.dtype | None = None) -> Tensors:
        """Outputs of all steps and both states after them."""
        own = {name: x.to(dtype or x.dtype, copy=True) for name, x in tensors.items()}
        outputs = []
        for t in range(STEPS):
            arguments: dict[str, Any] = {n: x[t] if n in PER_TOKEN else x for n, x in own.items()}
            outputs.append(decode_step(self.op, **arguments, backend=backend))
        return {"o": torch.stack(outputs), "state": own["state"], "conv_state": own["conv_state"]}

    def compiled(self) -> tuple[Any, ...]:
        """One worker compiles the kernels of all rules at one batch size."""
        return "decode", self.dtype, self.batch
