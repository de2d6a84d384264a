"""Seeded inputs of Mamba-2's ops, a run with every gradient, and the float64 definition: `accuracy.Case` for SSD."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from efla_kernels.selftest.accuracy import LAYOUTS, LONGEST_RECURRENCE, run_op
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
class SsdCase:
    """Shape, type and distribution of the inputs of "mamba2", "ssd", or (tokens of its own) "mamba2_step".

    key_width is the state's width N, value_width the heads' P. steps: a key of `STEPS`. masked: three tokens in ten are
    padding. strided: x, B and C are views of one tensor, and dt of another, as the models' projections give them.
    layout: of the gradients that arrive, a key of `accuracy.LAYOUTS`.
    """

    op: str
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    tokens: int = 300
    heads: int = 4
    groups: int = 1
    key_width: int = 128
    value_width: int = 64
    steps: str = "trained"
    masked: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    initial: bool = True
    final: bool = True
    strided: bool = False
    gradients: bool = True
    layout: str = "contiguous"

    @property
    def sequences(self) -> int:
        """Rows of the states."""
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def inputs(self, seed: int, device: torch.device | str, drawn_on: str = "cpu") -> dict[str, Tensor]:
        """The op's tensors by argument name; drawn on the CPU they are the same numbers on every machine."""
        generator = torch.Generator(drawn_on).manual_seed(seed)
        tokens = TOKENS if self.op == "mamba2_step" else self.tokens
        lead, H = (self.batch, tokens), self.heads
        states = (self.sequences, H, self.key_width, self.value_width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=drawn_on)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, device=drawn_on)

        raw = STEPS[self.steps](normal(*lead, H))
        rate = 1 + 15 * uniform(H)
        tensors = {"x": normal(*lead, H, self.value_width).to(self.dtype)}
        if self.op == "ssd":
            step = torch.nn.functional.softplus(raw)
            tensors |= {"dt": step, "log_decay": -rate * step}
        else:
            bias = 0.5 * normal(H)
            tensors |= {"dt": raw.to(self.dtype), "A_log": rate.log(), "D": normal(H), "dt_bias": bias}
        for name in "BC":
            tensors[name] = normal(*lead, self.groups, self.key_width).to(self.dtype)
        if self.masked:
            tensors["dt_mask"] = uniform(*lead) > 0.3
        if self.initial:
            tensors["initial_state"] = normal(*states)
        tensors["do"] = normal(*lead, H, self.value_width).to(self.dtype)
        tensors["d_final"] = normal(*states)
        return {name: t.to(device) for name, t in tensors.items()}

    def run(self, tensors: dict[str, Tensor], backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output, final state and the gradient of every input ("d" + its name), with inputs cast to `dtype`."""
        tensors = {n: t if dtype is None or n == "dt_mask" else t.to(dtype) for n, t in tensors.items()}
        if self.op == "mamba2_step":
            return self._decode(tensors, backend)
        if self.strided:
            tensors |= self._views(tensors)
        fixed = ("do", "d_final", "dt_mask")
        leaves = {n: t.detach().requires_grad_(self.gradients) for n, t in tensors.items() if n not in fixed}
        options: dict[str, Any] = {"output_final_state": self.final, "backend": backend}
        if self.masked:
            options["dt_mask"] = tensors["dt_mask"]
        if self.cu_seqlens is not None:
            options["cu_seqlens"] = torch.tensor(self.cu_seqlens, device=tensors["x"].device)
        given = [LAYOUTS[self.layout](tensors[name]) for name in fixed[:2]] if self.gradients else None
        return run_op(self.op, leaves, options, given)

    def truth(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same in float64 from the rounded inputs."""
        backend = "reference" if self.tokens <= LONGEST_RECURRENCE else "torch"
        return self.run(tensors, backend, torch.float64)

    def _views(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        flat = [tensors[name].flatten(2) for name in ("x", "B", "C")]
        x, B, C = torch.cat(flat, -1).split([t.shape[-1] for t in flat], -1)
        dt = torch.cat((flat[0], tensors["dt"]), -1)[..., flat[0].shape[-1] :]
        heads, groups = (self.heads, self.value_width), (self.groups, self.key_width)
        return {"x": x.unflatten(-1, heads), "B": B.unflatten(-1, groups), "C": C.unflatten(-1, groups), "dt": dt}

    def _decode(self, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
        wide = torch.float64 if tensors["x"].dtype == torch.float64 else torch.float32
        state = tensors["initial_state"].to(wide, copy=True)
        parameters = {n: tensors[n] for n in ("A_log", "D", "dt_bias")}
        outputs = []
        for t in range(TOKENS):
            token = {n: tensors[n][:, t] for n in ("x", "dt", "B", "C", "dt_mask") if n in tensors}
            outputs.append(mamba2_step(**token, **parameters, state=state, backend=backend))
        return {"o": torch.stack(outputs, 1), "state": state}
