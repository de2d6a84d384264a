"""Seeded inputs of the delta-rule ops, a run with every gradient, and errors against the float64 definition.

Shared by the self-test and the benchmark. The truth is the token recurrence in float64 on the same rounded inputs; for
long sequences the float64 chunked form, which the CPU tests hold to the recurrence within 1e-12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import efla_kernels

OPS = ("delta_rule", "deltanet", "efla", "gated_deltanet", "gated_efla")
# The recurrence takes some dozen launches per token, so that longer sequences go to the chunked form.
LONGEST_RECURRENCE = 512
# A gradient smaller than this part of k's (of x's in Mamba-2) is held to an absolute bound: the gates' underflow where
# beta |k|^2 or the decay is large.
FLOOR = 1e-6

# how the decay parameter g is drawn, as log g of uniform numbers u
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


@dataclass(frozen=True)
class Case:
    """Shape, type and distribution of one op's inputs.

    key_norm: norm of the keys; None: norms spread evenly in logarithm from 1e-2 to 1e2. keys: "normal", or "near": all
    within a percent of one direction. decay: a key of `DECAYS`; None: `delta_rule` has no decay. strided: q, k, v are
    views of one tensor, as the models' projection gives them. layout: of the gradients that arrive, a key of `LAYOUTS`.
    """

    op: str
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    tokens: int = 200
    heads: int = 2
    key_width: int = 128
    value_width: int = 128
    key_norm: float | None = 4.0
    keys: str = "normal"
    decay: str | None = None
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
        lead = (self.batch, self.tokens, self.heads)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=drawn_on)

        q, k, v = normal(*lead, self.key_width), normal(*lead, self.key_width), normal(*lead, self.value_width)
        if self.keys == "near":
            k = normal(self.batch, 1, self.heads, self.key_width) + 0.01 * k
        norm = self.key_norm
        exponents = 4 * torch.rand(*lead, 1, generator=generator, device=drawn_on) - 2
        k = F.normalize(k, dim=-1) * (10.0**exponents if norm is None else norm)
        logit, u = normal(*lead), torch.rand(*lead, generator=generator, device=drawn_on)
        qkv = [x.to(self.dtype) for x in (q, k, v)]
        gates = {"beta_logit": logit.to(self.dtype)}
        decay = DECAYS[self.decay or "mixed"](u)
        if self.op == "delta_rule":
            # 0 <= erase |k|^2 <= 1 keeps the rule stable; erase and write differ
            lam = qkv[1].double().square().sum(-1).float()
            gates = {
                "erase": torch.sigmoid(logit) / lam,
                "write": torch.rand(*lead, generator=generator, device=drawn_on) / lam.sqrt(),
            }
            if self.decay is not None:
                gates["log_decay"] = decay.clamp(min=-1e4)
        elif self.op.startswith("gated"):
            gates["log_g"] = decay
        tensors = dict(zip(("q", "k", "v"), qkv, strict=True)) | gates
        if self.initial:
            tensors["initial_state"] = normal(self.sequences, self.heads, self.key_width, self.value_width)
        tensors["do"] = normal(*lead, self.value_width).to(self.dtype)
        tensors["d_final"] = normal(self.sequences, self.heads, self.key_width, self.value_width)
        return {name: x.to(device) for name, x in tensors.items()}

    def run(self, tensors: dict[str, Tensor], backend: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output, final state and the gradient of every input ("d" + its name), with inputs cast to `dtype`."""
        tensors = {name: x if dtype is None else x.to(dtype) for name, x in tensors.items()}
        if self.strided:
            fused = torch.cat([tensors[name] for name in "qkv"], -1)
            widths = (self.key_width, self.key_width, self.value_width)
            tensors |= dict(zip("qkv", fused.split(widths, -1), strict=True))
        incoming = ("do", "d_final")
        leaves = {n: x.detach().requires_grad_(self.gradients) for n, x in tensors.items() if n not in incoming}
        cu_seqlens = None
        if self.cu_seqlens is not None:
            cu_seqlens = torch.tensor(self.cu_seqlens, device=tensors["q"].device)
        options: dict[str, Any] = {"output_final_state": self.final, "cu_seqlens": cu_seqlens, "backend": backend}
        given = [LAYOUTS[self.layout](tensors[name]) for name in incoming] if self.gradients else None
        return run_op(self.op, leaves, options, given)

    def truth(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same in float64 from the rounded inputs."""
        backend = "reference" if self.tokens <= LONGEST_RECURRENCE else "torch"
        return self.run(tensors, backend, torch.float64)


def run_op(
    op: str, leaves: dict[str, Tensor], options: dict[str, Any], incoming: list[Tensor] | None
) -> dict[str, Tensor]:
    """The op's output "o", its "state" where it has one, and with `incoming` (do, d_final) the leaves' gradients."""
    o, final = getattr(efla_kernels, op)(**leaves, **options)
    outputs = {"o": o} if final is None else {"o": o, "state": final}
    found = {name: x.detach() for name, x in outputs.items()}
    if incoming is not None:
        upstream = [given.to(x.dtype) for x, given in zip(outputs.values(), incoming)]
        taken = torch.autograd.grad(list(outputs.values()), list(leaves.values()), upstream)
        found |= {"d" + name: grad for name, grad in zip(leaves, taken, strict=True)}
    return found


def relative_errors(got: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
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


def underflowed(truth: dict[str, Tensor]) -> list[str]:
    """The gradients that `relative_errors` measures absolutely."""
    floor = _floor(truth)
    return [name for name, ref in truth.items() if name.startswith("d") and float(ref.norm()) < floor]


def _floor(truth: dict[str, Tensor]) -> float:
    yardstick = truth.get("dk", truth.get("dx"))
    return 0.0 if yardstick is None else FLOOR * float(yardstick.norm())
