"""Cases of the self-test: seeded inputs, a run with every gradient, the truth in float64, and bounds on the errors.

`MixerCase` is the frame of the token mixers' ops, `Case` the delta rules. The truth is the token recurrence in float64
on the same rounded inputs. For long sequences it is the chunked form in float64, which the CPU tests hold to the
recurrence within 1e-12. The benchmarks use the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import efla_kernels

Tensors = dict[str, Tensor]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPS = ("delta_rule", "deltanet", "efla", "gated_deltanet", "gated_efla")
# The recurrence takes dozens of launches per token, so longer sequences use the chunked form.
LONGEST_RECURRENCE = 512
# A gradient smaller than this part of k's (of x's in Mamba-2) is held to an absolute bound: the gates underflow where
# beta |k|^2 or the decay is large.
FLOOR = 1e-6
# Largest relative errors of values, gradients, and gradients of the decay
BOUNDS = {BF16: (1e-2, 2e-2, 2e-2), FP16: (1e-2, 2e-2, 2e-2), FP32: (1e-5, 1e-5, 5e-5)}
DECAY_GRADIENTS = ("dlog_g", "dlog_decay", "ddt", "dA_log", "ddt_bias")
CONSTANTS = ("do", "d_final", "dt_mask")  # tensors that get no gradient

# log g by name, from uniform numbers u
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "mixed": lambda u: F.logsigmoid(12 * u - 4),  # g from 0.018 to 0.9997
    "1": torch.zeros_like,
    "0.99..1": lambda u: torch.log1p(-0.01 * u),
    "0.5": lambda u: torch.full_like(u, 0.5).log(),
    "1e-4": lambda u: torch.full_like(u, 1e-4).log(),
    "1e-20": lambda u: torch.full_like(u, 1e-20).log(),
    "0": lambda u: torch.full_like(u, float("-inf")),
    "0 or 1": lambda u: torch.where(u < 0.1, float("-inf"), 0.0),
}

# how autograd may lay out the gradients that arrive; "expanded" and "one number" also change their values
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda d: d,
    "transposed": lambda d: d.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda d: F.pad(d, (0, 3))[..., :-3],
    "expanded": lambda d: d[..., :1, :].expand_as(d),
    "one number": lambda d: d.flatten()[0].expand_as(d),  # as sum() gives it
}


class Draw:
    """Seeded random numbers in fp32; drawn on the CPU they are the same on every machine."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.options: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, **self.options)

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(*shape, **self.options)


class Checked:
    """What every case has beside its own `inputs`, `run` and `truth`."""

    op: str
    dtype: torch.dtype
    tokens: int
    key_width: int
    value_width: int

    def inputs(self, seed: int, device: torch.device | str) -> Tensors:
        """The tensors by argument name."""
        raise NotImplementedError

    def run(self, tensors: Tensors, backend: str, dtype: torch.dtype | None = None) -> Tensors:
        """Outputs by name and gradients by "d" and the input's name, of inputs cast to `dtype`."""
        raise NotImplementedError

    def truth(self, tensors: Tensors) -> Tensors:
        """The same in float64 from the rounded inputs."""
        return self.run(tensors, "torch", torch.float64)

    def bound(self, output: str) -> float:
        """The largest relative error allowed for one output or gradient."""
        kind = 2 if output in DECAY_GRADIENTS else 1 if output.startswith("d") else 0
        return BOUNDS[self.dtype][kind]

    def errors(self, backend: str, device: str = "cpu", seed: int = 0) -> dict[str, float]:
        """Relative errors of one run."""
        tensors = self.inputs(seed, device)
        return relative_errors(self.run(tensors, backend), self.truth(tensors))

    def compiled(self) -> tuple[Any, ...]:
        """What chooses the compiled kernels: one worker runs all cases where this is the same."""
        return self.op, self.dtype


@dataclass(frozen=True)
class MixerCase(Checked):
    """Shape, type and form of the inputs of one op; subclasses draw them.

    strided: the inputs are views of wider tensors, as the models' projections give them. layout: of the gradients that
    arrive, a key of `LAYOUTS`.
    """

    op: str
    dtype: torch.dtype = BF16
    batch: int = 1
    tokens: int = 200
    heads: int = 2
    key_width: int = 128
    value_width: int = 128
    cu_seqlens: tuple[int, ...] | None = None
    initial: bool = True
    final: bool = True
    strided: bool = False
    gradients: bool = True
    layout: str = "contiguous"

    def finished(self, tensors: Tensors, draw: Draw, device: torch.device | str) -> Tensors:
        """The op's tensors on `device` with the initial state and the gradients that arrive."""
        rows = self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        states = (rows, self.heads, self.key_width, self.value_width)
        if self.initial:
            tensors["initial_state"] = draw.normal(*states)
        first = next(iter(tensors.values()))
        tensors["do"] = draw.normal(*first.shape[:3], self.value_width).to(self.dtype)
        tensors["d_final"] = draw.normal(*states)
        return {name: x.to(device) for name, x in tensors.items()}

    def run(self, tensors: Tensors, backend: str, dtype: torch.dtype | None = None) -> Tensors:
        """Output "o", final state and the gradient of every input."""
        tensors = cast(tensors, dtype)
        if self.strided:
            tensors |= self.views(tensors)
        leaves = as_leaves(tensors, CONSTANTS, self.gradients)
        options: dict[str, Any] = {"output_final_state": self.final, "backend": backend}
        options |= {name: tensors[name] for name in ("dt_mask",) if name in tensors}
        if self.cu_seqlens is not None:
            options["cu_seqlens"] = torch.tensor(self.cu_seqlens, device=tensors["do"].device)
        o, state = getattr(efla_kernels, self.op)(**leaves, **options)
        outputs = {"o": o} if state is None else {"o": o, "state": state}
        if not self.gradients:
            return {name: x.detach() for name, x in outputs.items()}
        return with_gradients(outputs, leaves, [LAYOUTS[self.layout](tensors[name]) for name in ("do", "d_final")])

    def views(self, tensors: Tensors) -> Tensors:
        """The inputs that are views of wider tensors."""
        raise NotImplementedError

    def truth(self, tensors: Tensors) -> Tensors:
        """The same in float64 from the rounded inputs."""
        return self.run(tensors, "reference" if self.tokens <= LONGEST_RECURRENCE else "torch", torch.float64)

    def compiled(self) -> tuple[Any, ...]:
        """The op, its types, widths and options."""
        flags = (self.cu_seqlens is None, self.initial, self.final, self.gradients, self.strided, self.tokens > 1000)
        return self.op, self.dtype, self.key_width, self.value_width, self.heads, flags


@dataclass(frozen=True)
class Case(MixerCase):
    """Inputs of one delta rule.

    key_norm: norm of the keys; None: norms spread evenly in logarithm from 1e-2 to 1e2. keys: "normal", or "near": all
    within a percent of one direction. decay: a key of `DECAYS`; None: `delta_rule` has no decay.
    """

    key_norm: float | None = 4.0
    keys: str = "normal"
    decay: str | None = None

    def inputs(self, seed: int, device: torch.device | str, drawn_on: str = "cpu") -> Tensors:
        """The op's tensors by argument name."""
        draw, lead = Draw(seed, drawn_on), (self.batch, self.tokens, self.heads)
        q, k, v = (draw.normal(*lead, width) for width in (self.key_width, self.key_width, self.value_width))
        if self.keys == "near":
            k = draw.normal(self.batch, 1, self.heads, self.key_width) + 0.01 * k
        exponents = 4 * draw.uniform(*lead, 1) - 2
        k = F.normalize(k, dim=-1) * (10.0**exponents if self.key_norm is None else self.key_norm)
        logit, u = draw.normal(*lead), draw.uniform(*lead)
        tensors = {name: x.to(self.dtype) for name, x in zip("qkv", (q, k, v))}
        decay = DECAYS[self.decay or "mixed"](u)
        if self.op == "delta_rule":
            # 0 <= erase |k|^2 <= 1 keeps the rule stable; erase and write differ
            lam = tensors["k"].double().square().sum(-1).float()
            tensors |= {"erase": torch.sigmoid(logit) / lam, "write": draw.uniform(*lead) / lam.sqrt()}
            if self.decay is not None:
                tensors["log_decay"] = decay.clamp(min=-1e4)
        else:
            tensors["beta_logit"] = logit.to(self.dtype)
            if self.op.startswith("gated"):
                tensors["log_g"] = decay
        return self.finished(tensors, draw, device)

    def views(self, tensors: Tensors) -> Tensors:
        """q, k and v are views of one tensor."""
        joined = torch.cat([tensors[name] for name in "qkv"], -1)
        return dict(zip("qkv", joined.split((self.key_width, self.key_width, self.value_width), -1), strict=True))

    def compiled(self) -> tuple[Any, ...]:
        """With and without decay apart."""
        return *super().compiled(), self.decay is None


def cast(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    """The floating point tensors in `dtype`; None: all as they are."""
    return {n: x if dtype is None or not x.is_floating_point() else x.to(dtype) for n, x in tensors.items()}


def as_leaves(tensors: Tensors, constants: Iterable[str], gradients: bool = True) -> Tensors:
    """All but the constants and integers, as leaves of a new graph."""
    named = {name: x for name, x in tensors.items() if name not in constants and x.is_floating_point()}
    return {name: x.detach().requires_grad_(gradients) for name, x in named.items()}


def with_gradients(outputs: Tensors, leaves: Tensors, upstream: Iterable[Tensor]) -> Tensors:
    """The outputs, and the leaves' gradients by "d" and their name; upstream: gradients of the outputs, in order."""
    given = [d.to(x.dtype) for x, d in zip(outputs.values(), upstream)]
    found = torch.autograd.grad(list(outputs.values()), list(leaves.values()), given)
    return {n: x.detach() for n, x in outputs.items()} | {f"d{n}": d for n, d in zip(leaves, found, strict=True)}


def relative_errors(got: Tensors, truth: Tensors) -> dict[str, float]:
    """|x - ref| / |ref| over each tensor; a gradient below `FLOOR` |dk| (|dx|) is measured against that instead.

    A value that is not finite counts as infinitely wrong: NaN would pass a comparison with a bound.
    """
    floor = _floor(truth)
    errors = {}
    for name, ref in truth.items():
        size = max(float(ref.norm()), floor if name.startswith("d") else 0.0)
        error = float((got[name].double() - ref).norm())
        errors[name] = (error / size if size else error) if bool(got[name].isfinite().all()) else float("inf")
    return errors


def underflowed(truth: Tensors) -> list[str]:
    """The gradients that `relative_errors` measures absolutely."""
    floor = _floor(truth)
    return [name for name, ref in truth.items() if name.startswith("d") and float(ref.norm()) < floor]


def _floor(truth: Tensors) -> float:
    yardstick = truth.get("dk", truth.get("dx"))
    return 0.0 if yardstick is None else FLOOR * float(yardstick.norm())
