"""Cases of Mamba-2's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.selftest.accuracy import Draw, MixerCase, Tensors, cast
from efla_kernels.ssd.ops import mamba2_step

# raw steps (before softplus) of a standard normal n: dt from 1e-3 to 0.1 as trained models start, and the ends
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "trained": lambda n: n - 3.5,
    "tiny": lambda n: n - 20.0,
    "large": lambda n: 4 * n + 8.0,
    "0 or large": lambda n: torch.where(n < 0, -60.0, 30.0),
}
TOKENS = 3  # of a decoding case: the second and third step read the state that the one before has written


@dataclass(frozen=True)
class SsdCase(MixerCase):
    """Inputs of "mamba2", "ssd", or (with three tokens) "mamba2_step".

    key_width is the state's width N, value_width the heads' P. steps: a key of `STEPS`. masked: three tokens in ten are
    padding.
    """

    tokens: int = 300
    heads: int = 4
    value_width: int = 64
    groups: int = 1
    steps: str = "trained"
    masked: bool = False

    def inputs(self, seed: int, device: torch.device | str, drawn_on: str = "cpu") -> Tensors:
        """The op's tensors by argument name."""
        draw, H = Draw(seed, drawn_on), self.heads
        lead = (self.batch, TOKENS if self.op == "mamba2_step" else self.tokens)
        raw = STEPS[self.steps](draw.normal(*lead, H))
        rate = 1 + 15 * draw.uniform(H)
        tensors = {"x": draw.normal(*lead, H, self.value_width).to(self.dtype)}
        if self.op == "ssd":
            step = F.softplus(raw)
            tensors |= {"dt": step, "log_decay": -rate * step}
        else:
            bias = 0.5 * draw.normal(H)
            tensors |= {"dt": raw.to(self.dtype), "A_log": rate.log(), "D": draw.normal(H), "dt_bias": bias}
        for name in "BC":
            tensors[name] = draw.normal(*lead, self.groups, self.key_width).to(self.dtype)
        if self.masked:
            tensors["dt_mask"] = draw.uniform(*lead) > 0.3
        return self.finished(tensors, draw, device)

    def run(self, tensors: Tensors, backend: str, dtype: torch.dtype | None = None) -> Tensors:
        """As `MixerCase.run`, and the steps of decoding."""
        if self.op != "mamba2_step":
            return super().run(tensors, backend, dtype)
        tensors = cast(tensors, dtype)
        wide = torch.float64 if tensors["x"].dtype == torch.float64 else torch.float32
        state = tensors["initial_state"].to(wide, copy=True)
        parameters = {n: tensors[n] for n in ("A_log", "D", "dt_bias")}
        outputs = []
        for t in range(TOKENS):
            token = {n: tensors[n][:, t] for n in ("x", "dt", "B", "C", "dt_mask") if n in tensors}
            outputs.append(mamba2_step(**token, **parameters, state=state, backend=backend))
        return {"o": torch.stack(outputs, 1), "state": state}

    def views(self, tensors: Tensors) -> Tensors:
        """x, B and C are views of one tensor, and dt of another."""
        flat = [tensors[name].flatten(2) for name in "xBC"]
        x, B, C = torch.cat(flat, -1).split([t.shape[-1] for t in flat], -1)
        dt = torch.cat((flat[0], tensors["dt"]), -1)[..., flat[0].shape[-1] :]
        heads, groups = (self.heads, self.value_width), (self.groups, self.key_width)
        return {"x": x.unflatten(-1, heads), "B": B.unflatten(-1, groups), "C": C.unflatten(-1, groups), "dt": dt}

    def compiled(self) -> tuple[Any, ...]:
        """Groups and padding apart."""
        return *super().compiled(), self.groups, self.masked
