"""Measures every implementation of every layer: compiled side by side, checked against float64, then timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from efla_kernels.selftest.accuracy import relative_errors
from torch import Tensor

from scripts.bench import measure as shared
from scripts.bench.measure import DTYPES, Row, Tensors, both_passes, differentiable, one_line
from scripts.bench.timing import figures
from scripts.bench_layers.calls import Layer, make_layer
from scripts.bench_layers.settings import LayerBenchSettings

DEVICE = "cuda"
# Largest relative errors that count as right: the loss as exact as an fp32 reference, the rest up to rounding.
LOSS_BOUND = 1e-5
BOUND = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}


@dataclass(frozen=True)
class Cell:
    """One layer at one width, with its inputs."""

    name: str
    hidden: int
    layer: Layer
    tensors: Tensors

    @staticmethod
    def make(settings: LayerBenchSettings, name: str, hidden: int) -> Cell:
        """The layer with inputs drawn from seed 0."""
        layer = make_layer(name, settings.batch, settings.tokens, hidden, settings.vocabulary)
        generator = torch.Generator(DEVICE).manual_seed(0)
        dtype = DTYPES[settings.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)

        return Cell(name, hidden, layer, layer.draw(normal))

    def leaves(self, impl: str) -> Tensors:
        """The inputs as `impl` holds them."""
        return self.layer.apart(self.tensors) if impl == "fla" and self.layer.apart else self.tensors

    def row(self, impl: str, direction: str) -> Row:
        """The columns that say what was measured."""
        return {"layer": self.name, "impl": impl, "hidden": self.hidden, "direction": direction}


def upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of the outputs, the same for every implementation; 1 for a loss."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    return [
        torch.ones_like(y) if y.dim() == 0 else torch.randn(y.shape, generator=generator, device=DEVICE).to(y.dtype)
        for y in outputs
    ]


def results(cell: Cell, impl: str, tensors: Tensors, dy: list[Tensor] | None) -> dict[str, Tensor]:
    """Outputs and gradients to the layer's own inputs, by name."""
    leaves = differentiable(tensors)
    outputs = cell.layer.form(impl)(leaves)
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    dy = upstream(outputs) if dy is None else [g.to(y.dtype) for g, y in zip(dy, outputs, strict=True)]
    gradients = torch.autograd.grad(outputs, list(wanted.values()), dy)
    named = dict(zip(cell.layer.outputs, (y.detach() for y in outputs), strict=True))
    return named | {f"d{n}": g for n, g in zip(wanted, gradients, strict=True)}


def accuracy(cell: Cell, impls: list[str]) -> dict[str, dict[str, float] | str]:
    """By implementation: the relative error of each output and gradient against float64, or why there is none."""
    wide = {n: x.double() if x.is_floating_point() else x for n, x in cell.tensors.items()}
    reference = "truth" if "truth" in cell.layer.forms else "torch"
    with torch.no_grad():
        dy = upstream(cell.layer.form(reference)(wide))
    dy = [g.to(next(iter(cell.tensors.values())).dtype).double() if g.dim() else g for g in dy]
    truth = results(cell, reference, wide, dy)
    found: dict[str, dict[str, float] | str] = {}
    for impl in impls:
        try:
            found[impl] = relative_errors(results(cell, impl, cell.tensors, dy), truth)
        except Exception as error:  # packages and compilers fail in any way; the row names the error
            found[impl] = one_line(error)
    return found


def is_right(name: str, dtype: str, errors: dict[str, float]) -> bool:
    """Whether a layer's errors are within the bounds."""
    return all(error <= (LOSS_BOUND if key == "loss" else BOUND[dtype]) for key, error in errors.items())


def measure(cell: Cell, settings: LayerBenchSettings, impl: str, errors: dict[str, float]) -> Iterator[Row]:
    """The rows of one implementation: forward alone (not of a loss, which keeps gradients), and both passes."""
    form, tensors = cell.layer.form(impl), cell.leaves(impl)
    right = is_right(cell.name, settings.dtype, errors)
    for direction, function in both_passes(form, tensors, upstream(form(tensors))).items():
        if direction == "fwd_bwd" or cell.name != "loss":
            measured = figures(function, settings.repeats)
            yield cell.row(impl, direction) | measured | {"rel_errs": errors, "right": right}


def measure_layer(
    settings: LayerBenchSettings, name: str, hidden: int, left_out: dict[tuple[str, str], str], deadline: float
) -> Iterator[Row]:
    """The rows of one layer at one width, correctness first; a row with `skipped` says why there is no figure.

    Where ours is wrong or raises, its row has `failed` and no figures.
    """
    cell = Cell.make(settings, name, hidden)
    impls = [impl for impl in settings.impls if (name, impl) not in left_out and impl in cell.layer.forms]
    for impl in settings.impls:
        if (name, impl) in left_out:
            yield cell.row(impl, "fwd_bwd") | {"skipped": left_out[name, impl]}
    found = accuracy(cell, impls)
    for impl in impls:
        errors = found[impl]
        ours = {"failed": True} if impl == "ours" else {}
        if isinstance(errors, str):
            yield cell.row(impl, "fwd_bwd") | {"skipped": errors} | ours
            continue
        if ours and not is_right(name, settings.dtype, errors):
            yield cell.row(impl, "fwd_bwd") | {"skipped": f"wrong, so not timed: {errors}"} | ours
            continue
        if time.perf_counter() > deadline:
            yield cell.row(impl, "fwd_bwd") | {"skipped": f"the {settings.budget_s} s of budget_s were over"}
            continue
        try:
            yield from measure(cell, settings, impl, errors)
        except Exception as error:
            yield cell.row(impl, "fwd_bwd") | {"skipped": one_line(error)} | ours
        torch.cuda.empty_cache()


def compile_side_by_side(settings: LayerBenchSettings) -> dict[tuple[str, str], str]:
    """Compile everything in parallel processes; the (layer, implementation) pairs that were not ready, and why."""
    jobs = [(settings, name, impl) for name in settings.layers for impl in settings.impls if impl != "torch"]
    late = shared.compile_side_by_side(warm, jobs, settings.workers, settings.compile_s)
    return {(name, impl): f"not compiled within compile_s={settings.compile_s} s" for _, name, impl in late}


def warm(settings: LayerBenchSettings, name: str, impl: str) -> None:
    """Run one implementation once at every width."""
    for hidden in settings.hidden:
        cell = Cell.make(settings, name, hidden)
        if impl not in cell.layer.forms:
            return
        try:
            results(cell, impl, cell.tensors, None)
            leaves = differentiable(cell.leaves(impl))
            with torch.no_grad():
                cell.layer.form(impl)(leaves)
        except Exception:
            return  # the measuring process names the error
