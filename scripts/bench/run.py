"""Measures every implementation of every op: compiled side by side, checked against float64, then timed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from efla_kernels.selftest.accuracy import Case, relative_errors
from efla_kernels.selftest.accuracy_ssd import SsdCase
from torch import Tensor

from scripts.bench import decoding, mamba_calls
from scripts.bench.calls import OWN, Call, Unserved, make_call
from scripts.bench.settings import BenchSettings
from scripts.bench.timing import figures, layer_figures
from scripts.study.setting_checks import pairs

DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAMBA_HEADS = 4  # heads of width 64 in Mamba-2 for each head of width 128 in the delta rules at the same hidden size
RECOMPUTING = "ours_recompute"  # differs from ours where there is a backward pass
TUNED_PARTS = 4  # processes among which mamba-ssm's configurations are divided for compilation
# Ours may not be timed while it is wrong; a peer beyond its bound is reported as it is.
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

    def row(self, impl: str, direction: str) -> dict[str, Any]:
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
    served = pairs(settings.shapes)[:1] if impl == "torch" else pairs(settings.shapes)
    heads = heads * MAMBA_HEADS if op == "mamba2" else heads
    return [Shape(op, batch, tokens, heads, settings.width, settings.dtype) for batch, tokens in served]


def directions(settings: BenchSettings, impl: str) -> list[str]:
    """The passes over whole sequences that an implementation is measured in."""
    return [d for d in settings.directions if d != "decode" and (d == "fwd_bwd" or impl != RECOMPUTING)]


def outputs(call: Call, tensors: dict[str, Tensor], leaf_names: list[str]) -> dict[str, Tensor]:
    """The output and the gradients to the op's own inputs."""
    leaves = {n: tensors[n].detach().requires_grad_() for n in leaf_names}
    o = call.whole(leaves)
    grads = torch.autograd.grad(o, list(leaves.values()), tensors["do"].to(o.dtype))
    return {"o": o.detach()} | {"d" + name: grad for name, grad in zip(leaves, grads, strict=True)}


def accuracy(shape: Shape, impls: list[str], seeds: int) -> dict[str, dict[str, float] | str]:
    """By implementation: the worst relative error of each output over the seeds, or why there is none."""
    found: dict[str, dict[str, float] | str] = {}
    case = shape.case()
    for seed in range(seeds):
        tensors = case.inputs(seed, DEVICE, drawn_on=DEVICE)
        truth = case.truth(tensors)
        leaf_names = [n for n in tensors if n not in ("do", "d_final")]
        for impl in impls:
            if isinstance(found.get(impl), str):
                continue
            try:
                call = make_call(shape.op, impl, tensors)
                errors = relative_errors(outputs(call, tensors, leaf_names), truth)
            except (Unserved, RuntimeError, ValueError) as error:  # a peer may refuse: say so and go on
                if impl in OWN:
                    raise
                try:  # forward alone
                    with torch.no_grad():
                        errors = relative_errors(
                            {"o": make_call(shape.op, impl, tensors).whole(tensors)}, _output(truth)
                        )
                except (Unserved, RuntimeError, ValueError):
                    found[impl] = " ".join(str(error).split())[:300]
                    continue
            worst = found.setdefault(impl, {})
            assert isinstance(worst, dict)
            for name, error_ in errors.items():
                worst[name] = max(error_, worst.get(name, 0.0))
    return found


def _output(truth: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"o": truth["o"]}


def measure(shape: Shape, impl: str, direction: str, errors: dict[str, float], repeats: int) -> dict[str, Any]:
    """One row of the result file."""
    tensors = shape.case().inputs(0, DEVICE, drawn_on=DEVICE)
    call = make_call(shape.op, impl, tensors)
    leaves = {name: x.detach().requires_grad_(direction == "fwd_bwd") for name, x in call.leaves.items()}
    do = tensors["do"]

    def forward() -> Tensor:
        with torch.no_grad():
            return call.timed(leaves)

    def both() -> Any:
        return torch.autograd.grad(call.timed(leaves), list(leaves.values()), do)

    function = forward if direction == "fwd" else both
    relevant = {"o": errors["o"]} if direction == "fwd" else errors
    return shape.row(impl, direction) | figures(function, repeats) | _errors(relevant)


def _errors(errors: dict[str, float]) -> dict[str, Any]:
    return {"rel_err": max(errors.values()), "rel_errs": errors}


def measure_op(settings: BenchSettings, op: str, heads: int) -> Iterator[dict[str, Any]]:
    """The rows of one op, correctness first at each shape; a row with `skipped` says why there is no figure."""
    by_shape: dict[Shape, list[str]] = {
        shape: [] for impl in settings.impls for shape in shapes(settings, op, impl, heads)
    }
    for impl in settings.impls:
        for shape in shapes(settings, op, impl, heads):
            by_shape[shape].append(impl)
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
                    yield shape.row(impl, direction) | {"skipped": " ".join(str(error).split())[:300]}
                torch.cuda.empty_cache()


def measure_decoding(settings: BenchSettings, op: str, heads: int) -> Iterator[dict[str, Any]]:
    """The decoding step's rows; `layers` counts the steps in a measurement, see `decoding`."""
    heads = heads * MAMBA_HEADS if op == "mamba2" else heads
    for batch in settings.decode_batches:
        shape = Shape(op, batch, 1, heads, settings.width, settings.dtype)
        for impl in settings.impls:
            if impl == RECOMPUTING or (impl == "mamba_ssm" and op != "mamba2"):
                continue
            inputs = decoding.decode_inputs(op, batch, heads, settings.width, DTYPES[settings.dtype], DEVICE)
            expected = {"o": decoding.truth(op, inputs)}
            try:
                layers = decoding.layers(inputs, settings.decode_layers)
                steps = [decoding.make_step(op, impl, layer) for layer in layers]
                with torch.no_grad():
                    errors = relative_errors({"o": steps[0]()}, expected)
                    if impl == "ours" and not errors["o"] <= BOUND[shape.dtype]:
                        raise AssertionError(f"{shape.row(impl, 'decode')}: wrong before it is timed: {errors}")
                    measured = {"layers": len(steps)} | layer_figures(steps, settings.repeats)
                    yield shape.row(impl, "decode") | measured | _errors(errors)
            except (Unserved, RuntimeError, ValueError, TypeError) as error:
                if impl == "ours":
                    raise
                yield shape.row(impl, "decode") | {"skipped": " ".join(str(error).split())[:300]}


def compile_side_by_side(settings: BenchSettings) -> None:
    """Compile everything in parallel processes; what they leave in Triton's cache on disk is then found ready."""
    jobs = [
        (settings, op, impl, heads, part, TUNED_PARTS if impl == "mamba_ssm" else 1)
        for op in settings.ops for heads in settings.heads for impl in settings.impls if impl != "torch"
        for part in range(TUNED_PARTS if impl == "mamba_ssm" and op == "mamba2" else 1)
    ]  # fmt: skip
    # fla would keep the tuning of these processes, which disturb each other; the measuring one tunes anew
    os.environ["FLA_CACHE_RESULTS"] = "0"
    with ProcessPoolExecutor(min(settings.workers, len(jobs)), mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(warm, *job) for job in jobs]:
            done.result()


def warm(settings: BenchSettings, op: str, impl: str, heads: int, part: int = 0, parts: int = 1) -> None:
    """Run one implementation once at every shape; mamba-ssm with a part of what its kernels are tuned over."""
    if impl == "mamba_ssm":
        mamba_calls.use_mamba_ssm(settings.mamba_ssm, part, parts)
    for shape in shapes(settings, op, impl, heads):
        tensors = shape.case().inputs(0, DEVICE, drawn_on=DEVICE)
        try:
            call = make_call(op, impl, tensors)
            leaf_names = [n for n in tensors if n not in ("do", "d_final")]
            with torch.no_grad():
                call.timed(call.leaves)
            if "fwd_bwd" in settings.directions:
                outputs(call, tensors, leaf_names)
        except (Unserved, RuntimeError, ValueError):
            return  # the measuring process will say it
