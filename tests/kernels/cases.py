"""Seeded inputs for every op, and the error metric that all kernel tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import efla_kernels
import torch
import torch.nn.functional as F
from torch import Tensor

DELTA_OPS = ("deltanet", "efla", "gated_deltanet", "gated_efla")
OPS = (*DELTA_OPS, "mamba2")
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 130, 200)


@dataclass
class Case:
    """Inputs of one op by name, the gradients that flow into its results, and how many sequences it has."""

    op: str
    inputs: dict[str, Tensor]
    state: Tensor
    grad_o: Tensor
    grad_state: Tensor
    cu_seqlens: Tensor | None = None
    use_state: bool = True
    key: str = "k"  # the input whose gradient sets the floor of the metric

    def run(self, backend: str, dtype: torch.dtype | None = None, autocast: bool = False) -> dict[str, Tensor]:
        """Outputs, final state and every gradient; in `dtype`, or as the inputs are. Autocast holds the forward."""
        leaves = {name: x.to(dtype or x.dtype).clone().requires_grad_() for name, x in self.inputs.items()}
        state = self.state.to(dtype or self.state.dtype).clone().requires_grad_() if self.use_state else None
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            o, final = getattr(efla_kernels, self.op)(
                **leaves, initial_state=state, output_final_state=True, cu_seqlens=self.cu_seqlens, backend=backend
            )
        if state is not None:
            leaves["initial_state"] = state
        loss = (o * self.grad_o.to(o.dtype)).sum() + (final * self.grad_state.to(final.dtype)).sum()
        # without tokens nothing depends on the inputs; otherwise an input that is not used is a fault
        idle = self.grad_o.shape[1] == 0
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=idle, materialize_grads=idle)
        return {"o": o, "final_state": final, **{f"d{n}": g for n, g in zip(leaves, grads, strict=True)}}

    def segments(self) -> list[Case]:
        """One dense case per segment of a packed one."""
        assert self.cu_seqlens is not None
        bounds = self.cu_seqlens.tolist()
        per_token = {n for n, x in self.inputs.items() if x.dim() >= 3}
        return [
            Case(
                self.op,
                {n: x[:, a:b] if n in per_token else x for n, x in self.inputs.items()},
                self.state[i : i + 1],
                self.grad_o[:, a:b],
                self.grad_state[i : i + 1],
                use_state=self.use_state,
                key=self.key,
            )
            for i, (a, b) in enumerate(pairwise(bounds))
        ]

    def run_segments(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """As `run`, but each segment alone: what a packed call must equal."""
        parts = [segment.run(backend, dtype) for segment in self.segments()]
        joined = {}
        for name, first in parts[0].items():
            pieces = [part[name] for part in parts]
            if name in ("final_state", "dinitial_state"):
                joined[name] = torch.cat(pieces)
            elif first.dim() == 1:  # a parameter: its gradient sums over the segments
                joined[name] = torch.stack(pieces).sum(0)
            else:
                joined[name] = torch.cat(pieces, 1)
        return joined


def make_case(
    op: str,
    tokens: int,
    *,
    batch: int = 2,
    heads: int = 2,
    key_width: int = 16,
    value_width: int = 24,
    cu_seqlens: list[int] | None = None,
    use_state: bool = True,
    seed: int = 0,
    key_scale: float = 1.0,
    keys: Callable[[Tensor], Tensor] | None = None,
    beta_logit: Callable[[Tensor], Tensor] | None = None,
    log_g: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A case of standard normal inputs; `keys`, `beta_logit` reshape normals, `log_g` maps uniforms in [0, 1)."""
    generator = torch.Generator().manual_seed(seed * 1000 + tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if op == "mamba2":
        # H heads of width P = value_width, state width N = key_width, two groups
        heads *= 2
        x = normal(batch, tokens, heads, value_width)
        inputs = {
            "x": x,
            "dt": normal(batch, tokens, heads),
            "A_log": normal(heads) * 0.5,
            "B": normal(batch, tokens, 2, key_width),
            "C": normal(batch, tokens, 2, key_width),
            "D": normal(heads),
            "dt_bias": normal(heads) - 2,
        }
    else:
        k = normal(batch, tokens, heads, key_width)
        logit = normal(batch, tokens, heads)
        inputs = {
            "q": normal(batch, tokens, heads, key_width),
            "k": (keys(k) if keys else k) * key_scale,
            "v": normal(batch, tokens, heads, value_width),
            "beta_logit": beta_logit(logit) if beta_logit else logit,
        }
        if op.startswith("gated"):
            uniform = torch.rand(batch, tokens, heads, generator=generator)
            inputs["log_g"] = log_g(uniform) if log_g else F.logsigmoid(6 * uniform - 1)
    state = normal(sequences, heads, key_width, value_width)
    return Case(
        op,
        {name: x.to(dtype) for name, x in inputs.items()},
        state,
        normal(batch, tokens, heads, value_width).to(dtype),
        normal(*state.shape),
        None if cu_seqlens is None else torch.tensor(cu_seqlens),
        use_state,
        "B" if op == "mamba2" else "k",
    )


def relative_errors(got: dict[str, Tensor], ref: dict[str, Tensor], key: str = "k") -> dict[str, float]:
    """|x - ref| / max(|ref|, floor); a gradient's floor is 1e-6 |dk_ref|, so one that underflows divides by no zero."""
    assert got.keys() == ref.keys()
    floor = 1e-6 * float(ref[f"d{key}"].detach().norm())
    errors = {}
    for name, x in got.items():
        expected = ref[name].detach().double()
        size = max(float(expected.norm()), floor if name.startswith("d") else 0.0)
        error = float((x.detach().double() - expected).norm())
        errors[name] = error / size if size else error
    return errors


def assert_close(got: dict[str, Tensor], ref: dict[str, Tensor], bound: float, key: str = "k") -> None:
    """Every entry finite and within `bound` in the relative metric."""
    errors = relative_errors(got, ref, key)
    bad = {name: error for name, error in errors.items() if not error <= bound}
    assert not bad, f"above {bound}: {bad}"
