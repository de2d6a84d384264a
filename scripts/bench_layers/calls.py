"""The layers around the token mixers, as PyTorch and as the installed packages compute them.

`torch` is the definition (that of `efla_lm.models`, in the inputs' types) and the truth in float64; `compile` is the
same under torch.compile. The other packages are imported where they are used: one that is missing costs its rows only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import efla_kernels
import torch
import torch.nn.functional as F
from efla_kernels.delta_rule.coefficients import widened
from torch import Tensor

from scripts.bench.measure import Tensors, Unserved

EPS = 1e-6
KERNEL_SIZE = 4
HEAD = 128
Form = Callable[[Tensors], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Layer:
    """One layer at one shape: its outputs' names, its inputs, and its forms by implementation."""

    outputs: tuple[str, ...]
    draw: Callable[[Callable[..., Tensor]], Tensors]
    forms: dict[str, Callable[[], Form]]
    # inputs as fla's layer holds them, where that is other tensors
    apart: Callable[[Tensors], Tensors] | None = None

    def form(self, impl: str) -> Form:
        """The function of `impl`. Raises Unserved where it has none, or its package is missing."""
        if impl not in self.forms:
            raise Unserved(f"{impl} has no such layer")
        try:
            return self.forms[impl]()
        except (ImportError, AttributeError) as missing:
            raise Unserved(f"{impl} cannot be imported: {missing}") from missing


def make_layer(name: str, batch: int, tokens: int, hidden: int, vocabulary: int) -> Layer:
    """Layer `name` (of `settings.LAYERS`) for batch x tokens positions."""
    rows = batch * tokens
    if name == "convolution":
        return _convolution(batch, tokens, (hidden,) * 3, bias=False)
    if name == "convolution_mamba2":
        return _convolution(batch, tokens, (2 * hidden, HEAD, HEAD), bias=True)
    if name == "loss":
        return _loss(rows, hidden, vocabulary)
    if name == "swiglu":
        return _swiglu(rows, hidden, _intermediate(hidden))
    return {"norm": _norm, "residual_norm": _residual_norm, "gated_norm": _gated_norm}[name](rows, hidden)


def _intermediate(hidden: int) -> int:
    """SwiGLU's width at 340M and 1.3B: 11/4 of the residual stream's."""
    return hidden * 11 // 4


def _compiled(form: Form) -> Callable[[], Form]:
    return lambda: torch.compile(form, fullgraph=True, dynamic=False)


def _find(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _convolution(batch: int, tokens: int, widths: tuple[int, ...], bias: bool) -> Layer:
    D = sum(widths)

    def draw(normal: Callable[..., Tensor]) -> Tensors:
        x = {"x": normal(batch, tokens, D), "weight": normal(D, KERNEL_SIZE) / 2}
        return x | {"bias": normal(D)} if bias else x

    def own(backend: str) -> Form:
        return lambda x: efla_kernels.short_convolution(
            x["x"], x["weight"], x.get("bias"), widths=widths, backend=backend
        )

    def apart(x: Tensors) -> Tensors:
        """A projection, a convolution and its parameters for each part; Mamba-2's are one in fla too."""
        if bias:
            return x
        parts = {f"x{i}": part.contiguous() for i, part in enumerate(x["x"].split(widths, -1))}
        return parts | {f"weight{i}": part.contiguous() for i, part in enumerate(x["weight"].split(widths))}

    def fla() -> Form:
        function = _find("fla.modules.causal_conv1d", "causal_conv1d")

        def run(x: Tensors) -> tuple[Tensor, ...]:
            if bias:
                y = function(x["x"], x["weight"], x["bias"], activation="silu", backend="triton")[0]
                return y.split(widths, -1)
            x = x if "x0" in x else apart(x)
            return tuple(
                function(x[f"x{i}"], x[f"weight{i}"], activation="silu", backend="triton")[0]
                for i in range(len(widths))
            )

        return run

    forms = {
        "torch": lambda: own("torch"), "compile": _compiled(own("torch")), "fla": fla, "ours": lambda: own("auto"),
    }  # fmt: skip
    return Layer(("q", "k", "v"), draw, forms, apart)


def _loss(rows: int, hidden: int, vocabulary: int) -> Layer:
    """Mean cross-entropy of a linear head. Targets are drawn by their own seed, a sixteenth of them is ignored."""

    def draw(normal: Callable[..., Tensor]) -> Tensors:
        h, weight = normal(rows, hidden), normal(vocabulary, hidden) / hidden**0.5
        generator = torch.Generator().manual_seed(1)
        targets = torch.randint(vocabulary, (rows,), generator=generator)
        targets[torch.rand(rows, generator=generator) < 1 / 16] = -100
        return {"h": h, "weight": weight, "targets": targets.to(h.device)}

    def plain(x: Tensors) -> tuple[Tensor, ...]:
        total, blocks = torch.zeros((), device=x["h"].device, dtype=torch.float64), 1
        if x["h"].dtype == torch.float64:  # the truth of many tokens, in pieces that fit
            blocks = -(-rows // 2048)
        for h, t in zip(x["h"].chunk(blocks), x["targets"].chunk(blocks), strict=True):
            total = total + F.cross_entropy(widened(F.linear(h, x["weight"])), t, reduction="sum")
        return (total / (x["targets"] >= 0).sum(),)

    def direct(x: Tensors) -> tuple[Tensor, ...]:
        return (F.cross_entropy(F.linear(x["h"], x["weight"]).float(), x["targets"]),)

    def ours(x: Tensors) -> tuple[Tensor, ...]:
        total = efla_kernels.linear_cross_entropy(x["h"], x["weight"], x["targets"])
        return (total / (x["targets"] >= 0).sum(),)

    def fla() -> Form:
        function = _find("fla.modules.fused_linear_cross_entropy", "fused_linear_cross_entropy_loss")
        return lambda x: (function(x["h"], x["targets"], x["weight"]),)

    def liger() -> Form:
        function = _find("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")

        def run(x: Tensors) -> tuple[Tensor, ...]:
            result = function.apply(x["h"], x["weight"], x["targets"])
            return (result[0] if isinstance(result, tuple) else result,)

        return run

    def cce() -> Form:
        function = _find("cut_cross_entropy", "linear_cross_entropy")
        return lambda x: (function(x["h"], x["weight"], x["targets"]),)

    forms = {
        "truth": lambda: plain, "torch": lambda: direct, "compile": _compiled(direct), "fla": fla, "liger": liger,
        "cce": cce, "ours": lambda: ours,
    }  # fmt: skip
    return Layer(("loss",), draw, forms)


def _norm(rows: int, hidden: int) -> Layer:
    def draw(normal: Callable[..., Tensor]) -> Tensors:
        return {"x": normal(rows, hidden), "weight": 1 + normal(hidden) / 8}

    def plain(x: Tensors) -> tuple[Tensor, ...]:
        return (F.rms_norm(x["x"], (hidden,), x["weight"], EPS),)

    def fla() -> Form:
        function = _find("fla.modules.norm.layernorm", "rms_norm")
        return lambda x: (function(x["x"], x["weight"], None, eps=EPS),)

    def liger() -> Form:
        function = _find("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
        return lambda x: (function.apply(x["x"], x["weight"], EPS, 0.0, "llama", False),)

    return Layer(("y",), draw, {"torch": lambda: plain, "compile": _compiled(plain), "fla": fla, "liger": liger})


def _residual_norm(rows: int, hidden: int) -> Layer:
    """The residual stream after an addition, and its norm."""

    def draw(normal: Callable[..., Tensor]) -> Tensors:
        return {"x": normal(rows, hidden), "residual": normal(rows, hidden), "weight": 1 + normal(hidden) / 8}

    def plain(x: Tensors) -> tuple[Tensor, ...]:
        stream = x["residual"] + x["x"]
        return F.rms_norm(stream, (hidden,), x["weight"], EPS), stream

    def fla() -> Form:
        function = _find("fla.modules.norm.layernorm", "rms_norm")
        return lambda x: tuple(function(x["x"], x["weight"], None, residual=x["residual"], eps=EPS, prenorm=True))

    def liger() -> Form:
        function = _find("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
        return lambda x: tuple(function.apply(x["x"], x["residual"], x["weight"], EPS, 0.0, "llama", False))

    forms = {"torch": lambda: plain, "compile": _compiled(plain), "fla": fla, "liger": liger}
    return Layer(("y", "stream"), draw, forms)


def _gated_norm(rows: int, hidden: int) -> Layer:
    """The output norm of the gated delta rules, over heads of 128."""
    shape = (rows, hidden // HEAD, HEAD)

    def draw(normal: Callable[..., Tensor]) -> Tensors:
        return {"x": normal(*shape), "gate": normal(*shape), "weight": 1 + normal(HEAD) / 8}

    def plain(x: Tensors) -> tuple[Tensor, ...]:
        y = F.rms_norm(widened(x["x"]), (HEAD,), eps=EPS) * widened(x["weight"])
        return ((y * F.silu(widened(x["gate"]))).to(x["x"].dtype),)

    def fla() -> Form:
        function = _find("fla.modules.norm.fused_norm_gate", "rms_norm_gated")
        return lambda x: (function(x["x"], x["gate"], x["weight"], None, eps=EPS),)

    return Layer(("y",), draw, {"torch": lambda: plain, "compile": _compiled(plain), "fla": fla})


def _swiglu(rows: int, hidden: int, width: int) -> Layer:
    """Gate and up are the halves of one tensor, as in the model; their activation, and the matmul that follows it."""

    def draw(normal: Callable[..., Tensor]) -> Tensors:
        return {"gate_up": normal(rows, 2 * width), "weight": normal(hidden, width) / width**0.5}

    def plain(x: Tensors) -> tuple[Tensor, ...]:
        gate, up = x["gate_up"].chunk(2, -1)
        return (F.linear(F.silu(gate) * up, x["weight"]),)

    def fla() -> Form:
        function = _find("fla.modules.activations", "swiglu_linear")
        return lambda x: (function(*x["gate_up"].chunk(2, -1), x["weight"], None),)

    def liger() -> Form:
        function = _find("liger_kernel.ops.swiglu", "LigerSiLUMulFunction")
        return lambda x: (F.linear(function.apply(*x["gate_up"].chunk(2, -1)), x["weight"]),)

    def ours() -> Form:
        return lambda x: (efla_kernels.swiglu_linear(x["gate_up"], x["weight"]),)

    forms = {"torch": lambda: plain, "compile": _compiled(plain), "fla": fla, "liger": liger, "ours": ours}
    return Layer(("y",), draw, forms)
