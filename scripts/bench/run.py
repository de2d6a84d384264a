"""Measures every implementation of every op: compiled side by side, checked against float64, then timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from efla_kernels.selftest.accuracy import Case, relative_errors
from efla_kernels.selftest.accuracy_ssd import SsdCase

from scripts.bench import decoding, mamba_calls
from scripts.bench.calls import OWN, Call, make_call
from scripts.bench.measure import DTYPES, Row, Tensors, Unserved, both_passes
from scripts.bench.settings import BenchSettings
from scripts.bench.timing import figures, layer_figures
from scripts.study.checks import parse_shapes

DEVICE = "cuda"
MAMBA_HEADS = 4  # heads of width 64 in Mamba-2 for each head of width 128 in the delta rules at the same hidden size
RECOMPUTING = "ours_recompute"  # differs from ours in the backward pass only
TUNED_PARTS = 4  # processes among which mamba-ssm's configurations are divided for compilation
# Ours is not timed while it is wrong; a peer beyond its bound is reported with its error.
BOUND = {"bf16": 2e-2, "fp16": 2e-2, "fp32": 1e-4}


@dataclass(frozen=True)
class Shape:
    """One op at one shape."""

    op: str
    batch: int
    tokens: int
    heads: int
    width: int
    dtype: str

    def case(self) -> Case | SsdCase:
        """Raw keys of norm 4, no states: what the op is trained with.

        Mamba-2 has the same hidden size: twice the inner width, in heads half as wide.
        """
        if self.op == "mamba2":
            return SsdCase(
                "mamba2", DTYPES[self.dtype], batch=self.batch, tokens=self.tokens, heads=self.heads,
                key_width=self.width, value_width=self.width // 2, initial=False, final=False,
            )  # fmt: skip
        return Case(
            self.op, DTYPES[self.dtype], batch=self.batch, tokens=self.tokens, heads=self.heads,
            key_width=self.width, value_width=self.width, initial=False, final=False,
        )  # fmt: skip

    def row(self, impl: str, direction: str) -> Row:
        """The columns that say what was measured."""
        return {
            "op": self.op, "impl": impl, "batch": self.batch, "tokens": self.tokens, "heads": self.heads,
            "key_width": self.width, "value_width": self.case().value_width, "dtype": self.dtype,
            "direction": direction,
        }  # fmt: skip


def shapes(settings: BenchSettings, op: str, impl: str, heads: int) -> list[Shape]:
    """The shapes of one implementation; the PyTorch form, slow and large, takes the first only."""
    if impl == "mamba_ssm" and op != "mamba2":
        return []
    served = parse_shapes(settings.shapes)[:1] if impl == "torch" else parse_shapes(settings.shapes)
    heads = heads * MAMBA_HEADS if op == "mamba2" else heads
    return [Shape(op, batch, tokens, heads, settings.width, settings.dtype) for batch, tokens in served]


def directions(settings: BenchSettings, impl: str) -> list[str]:
    """The passes over whole sequences in which an implementation is measured."""
    return [d for d in settings.directions if d != "decode" and (d == "fwd_bwd" or impl != RECOMPUTING)]


def outputs(call: Call, tensors: Tensors, names: list[str]) -> Tensors:
    """The output and the gradients of the op's own inputs."""
    leaves = {n: tensors[n].detach().requires_grad_() for n in names}
    o = call.whole(leaves)
    grads = torch.autograd.grad(o, list(leaves.values()), tensors["do"].to(o.dtype))
    return {"o": o.detach()} | {"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}


def inputs_of(tensors: Tensors) -> list[str]:
    """The names of the op's own inputs."""
    return [n for n in tensors if n not in ("do", "d_final")]


def accuracy(shape: Shape, impls: list[str], seeds: int) -> dict[str, dict[str, float] | str]:
    """By implementation: the worst relative error of each output over the seeds, or why there is none.

    Where a peer's backward pass fails, the errors are those of its forward pass.
    """
    found: dict[str, dict[str, float] | str] = {}
    for seed in range(seeds):
        tensors = shape.case().inputs(seed, DEVICE, drawn_on=DEVICE)
        truth = shape.case().truth(tensors)
        for impl in impls:
            worst = found.setdefault(impl, {})
            if isinstance(worst, str):
                continue
            try:
                call = make_call(shape.op, impl, tensors)
                errors = relative_errors(outputs(call, tensors, inputs_of(tensors)), truth)
            except (Unserved, RuntimeError, ValueError) as error:
                if impl in OWN:
                    raise
                try:
                    with torch.no_grad():
                        o = make_call(shape.op, impl, tensors).whole(tensors)
                    errors = relative_errors({"o": o}, {"o": truth["o"]})
                except (Unserved, RuntimeError, ValueError):
                    found[impl] = reason(error)
                    continue
            worst |= {name: max(error, worst.get(name, 0.0)) for name, error in errors.items()}
    return found


def reason(error: BaseException) -> str:
    """Why a peer has no figures."""
    return " ".join(str(error).split())[:300]


def error_columns(errors: dict[str, float]) -> Row:
    """The columns of accuracy."""
    return {"rel_err": max(errors.values()), "rel_errs": errors}


def measure(shape: Shape, impl: str, direction: str, errors: dict[str, float], repeats: int) -> Row:
    """One row of the result file."""
    tensors = shape.case().inputs(0, DEVICE, drawn_on=DEVICE)
    call = make_call(shape.op, impl, tensors)
    function = both_passes(call.timed, call.leaves, tensors["do"])[direction]
    relevant = {"o": errors["o"]} if direction == "fwd" else errors
    return shape.row(impl, direction) | figures(function, repeats) | error_columns(relevant)


def measure_op(settings: BenchSettings, op: str, heads: int) -> Iterator[Row]:
    """The rows of one op, correctness first at each shape; a row with `skipped` says why there is no figure."""
    by_shape: dict[Shape, list[str]] = {}
    for impl in settings.impls:
        for shape in shapes(settings, op, impl, heads):
            by_shape.setdefault(shape, []).append(impl)
    for shape, impls in by_shape.items():
        found = accuracy(shape, impls, settings.seeds)
        for impl in impls:
            errors = found[impl]
            for direction in directions(settings, impl):
                if isinstance(errors, str):
                    yield shape.row(impl, direction) | {"skipped": errors}
                    continue
                if impl in OWN and not max(errors.values()) <= BOUND[shape.dtype]:
                    raise AssertionError(f"{shape.row(impl, direction)}: wrong before it is timed: {errors}")
                if direction == "fwd_bwd" and set(errors) == {"o"}:
                    yield shape.row(impl, direction) | {"skipped": "its backward pass refuses to run here"}
                    continue
                try:
                    yield measure(shape, impl, direction, errors, settings.repeats)
                except (RuntimeError, ValueError) as error:
                    if impl in OWN:
                        raise
                    yield shape.row(impl, direction) | {"skipped": reason(error)}
                torch.cuda.empty_cache()


def measure_decoding(settings: BenchSettings, op: str, heads: int) -> Iterator[Row]:
    """The rows of the decoding step; `layers` is the number of steps in a measurement (module `decoding`)."""
    heads = heads * MAMBA_HEADS if op == "mamba2" else heads
    impls = [i for i in settings.impls if i != RECOMPUTING and (i != "mamba_ssm" or op == "mamba2")]
    for batch in settings.decode_batches:
        shape = Shape(op, batch, 1, heads, settings.width, settings.dtype)
        inputs = decoding.decode_inputs(op, batch, heads, settings.width, DTYPES[settings.dtype], DEVICE)
        expected = {"o": decoding.truth(op, inputs)}
        for impl in impls:
            try:
                layers = decoding.layers(inputs, settings.decode_layers)
                steps = [decoding.make_step(op, impl, layer) for layer in layers]
                with torch.no_grad():
                    errors = relative_errors({"o": steps[0]()}, expected)
                    if impl == "ours" and not errors["o"] <= BOUND[shape.dtype]:
                        raise AssertionError(f"{shape.row(impl, 'decode')}: wrong before it is timed: {errors}")
                    measured = {"layers": len(steps)} | layer_figures(steps, settings.repeats)
                    yield shape.row(impl, "decode") | measured | error_columns(errors)
            except (Unserved, RuntimeError, ValueError, TypeError) as error:
                if impl == "ours":
                    raise
                yield shape.row(impl, "decode") | {"skipped": reason(error)}


def jobs(settings: BenchSettings) -> list[tuple[BenchSettings, str, str, int, int, int]]:
    """The arguments of `warm` for all that is to be compiled."""
    found = []
    for op in settings.ops:
        for heads in settings.heads:
            for impl in settings.impls:
                parts = TUNED_PARTS if (impl, op) == ("mamba_ssm", "mamba2") else 1
                found += [(settings, op, impl, heads, part, parts) for part in range(parts) if impl != "torch"]
    return found


def warm(settings: BenchSettings, op: str, impl: str, heads: int, part: int = 0, parts: int = 1) -> None:
    """Run one implementation once at every shape; mamba-ssm with a part of what its kernels are tuned over."""
    if impl == "mamba_ssm":
        mamba_calls.use_mamba_ssm(settings.mamba_ssm, part, parts)
    for shape in shapes(settings, op, impl, heads):
        tensors = shape.case().inputs(0, DEVICE, drawn_on=DEVICE)
        try:
            call = make_call(op, impl, tensors)
            with torch.no_grad():
                call.timed(call.leaves)
            if "fwd_bwd" in settings.directions:
                outputs(call, tensors, inputs_of(tensors))
        except (Unserved, RuntimeError, ValueError):
            return  # the measuring process names the error
