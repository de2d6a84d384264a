"""The convolution's kernels in Triton's interpreter; run by test_convolution.py under TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from efla_kernels import convolution_state, short_convolution
from efla_kernels.launch.choices import interpreted
from efla_kernels.layers import convolution_op as kernels
from efla_kernels.selftest.accuracy_layers import CONSTANTS, ConvolutionCase
from efla_kernels.selftest.rows_layers import CONVOLUTIONS
from efla_kernels.selftest.run import poisoned_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    assert interpreted(), "these tests need TRITON_INTERPRET=1"
    with poisoned_memory():
        yield


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_kernels_against_float64(name: str) -> None:
    errors = CONVOLUTIONS[name].errors("triton")
    assert all(error <= 1e-6 for error in errors.values()), errors


@pytest.mark.parametrize("rows", [1, 4])
def test_other_blocks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of several rows of the batch in one program, the last program not full; short strips backwards."""
    monkeypatch.setattr(kernels, "FORWARD", kernels.Block(strip=16, rows=rows, channels=16, warps=1))
    monkeypatch.setattr(kernels, "BACKWARD", kernels.Block(strip=4 * rows, rows=1, channels=16, warps=1, stages=3))
    case = ConvolutionCase(batch=3, tokens=21, widths=(24, 8), bias=True)
    for one in (replace(case, state=True), replace(case, scaled=True), replace(case, tokens=32, scaled=True)):
        errors = one.errors("triton")
        assert all(error <= 1e-6 for error in errors.values()), errors


def test_strips_grow_with_the_problem() -> None:
    """As long as enough programs are left; never much longer than the row."""
    shapes = [(32, 2048), (16, 2048), (8, 2048), (1, 16384), (8, 512), (1, 2048), (300, 70), (1, 5), (1, 1)]
    strips = [kernels.strip_of(kernels.BACKWARD, B, T, 24) for B, T in shapes]
    assert strips == [512, 512, 256, 256, 64, 32, 128, 8, 4]


@pytest.mark.parametrize("scaled", [False, True])
def test_16_bit_inputs_are_rounded_once(scaled: bool) -> None:
    """y is the rounded result of fp32 sums; the gradients come in the inputs' types."""
    case = ConvolutionCase(tokens=20, dtype=torch.bfloat16, bias=True, scaled=scaled)
    tensors = case.inputs(0, "cpu")
    got, truth = case.run(tensors, "triton"), case.truth(tensors)
    assert {x.dtype for x in got.values()} == {torch.bfloat16}
    assert (got["y"].double() - truth["y"].to(torch.bfloat16).double()).abs().max() <= 2e-2
    assert all((got[name] - x).norm() <= 4e-3 * x.norm() for name, x in truth.items())


def test_a_part_without_a_gradient() -> None:
    case = ConvolutionCase(tokens=20)
    tensors = case.inputs(0, "cpu")
    dy = tensors["dy"]
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if name != "dy"}
    first, _, last = short_convolution(**leaves, widths=case.widths, backend="triton")
    end = case.widths[0]
    found = torch.autograd.grad((first * dy[..., :end]).sum(), list(leaves.values()))
    masked = torch.cat((dy[..., :end], torch.zeros_like(dy[..., end:])), -1)
    expected = case.truth(tensors | {"dy": masked})
    assert (found[0] - expected["dx"]).norm() <= 1e-6 * expected["dx"].norm()
    assert (found[1] - expected["dweight"]).norm() <= 1e-6 * expected["dweight"].norm()
    assert last.is_contiguous() and first.is_contiguous()


def test_split_at_any_point_with_gradients() -> None:
    """Two calls with the state between them are one call, in outputs and in the gradient of the whole input."""
    case = ConvolutionCase(batch=1, tokens=12, bias=True)
    tensors = case.inputs(0, "cpu")
    dy = tensors["dy"]
    expected = case.truth(tensors)
    for cut in (1, 2, 3, 7, 11):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items() if name != "dy"}
        x, shared = leaves["x"], {name: leaves[name] for name in ("weight", "bias")}
        head = short_convolution(x[:, :cut], **shared, backend="triton")[0]
        state = convolution_state(x[:, :cut], case.kernel_size)
        tail = short_convolution(x[:, cut:], **shared, state=state, backend="triton")[0]
        y = torch.cat((head, tail), 1)
        assert (y - expected["y"]).norm() <= 1e-6 * expected["y"].norm()
        for name, g in zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True):
            assert (g - expected[f"d{name}"]).norm() <= 1e-6 * expected[f"d{name}"].norm(), (cut, name)


class Seen(TorchDispatchMode):
    """The parts of every forward op of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[list[int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if function is torch.ops.efla_kernels.convolution.default:
            self.parts.append(list(args[-1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("scaled", [False, True])
def test_last_part_apart(scaled: bool) -> None:
    """Two ops where somebody watches, one gradient; compiled or not the same numbers."""
    case = ConvolutionCase(tokens=21, widths=(8, 8, 16), bias=True, scaled=scaled)
    tensors = case.inputs(0, "cpu")
    truth = case.truth(tensors)
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if name not in CONSTANTS}

    def run(leaves: dict[str, Tensor], apart: bool = True) -> Tensor:
        factors = tensors.get("row_scale")
        parts = short_convolution(**leaves, widths=case.widths, row_scale=factors, last_apart=apart, backend="triton")
        return torch.cat(parts, -1)

    with Seen() as seen:
        watched = run(leaves)
        gradients = torch.autograd.grad(watched, list(leaves.values()), tensors["dy"])
    assert seen.parts == [[8, 8], [16]]
    results = [(watched, *gradients)]
    for form in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        y = form(leaves)
        results.append((y, *torch.autograd.grad(y, list(leaves.values()), tensors["dy"])))
    for result in results:
        for got, expected in zip(result, truth.values(), strict=True):
            assert (got - expected).norm() <= 1e-6 * expected.norm()
    with Seen() as seen, torch.no_grad():
        run(leaves)
    with Seen() as together:
        run(leaves, apart=False)
    assert seen.parts == together.parts == [[8, 8, 16]], "one op where nothing is computed again"


@pytest.mark.parametrize(
    "case",
    [
        ConvolutionCase(tokens=3, widths=(8, 4, 4)),
        ConvolutionCase(tokens=3, widths=(8,), bias=True, state=True),
        ConvolutionCase(batch=1, tokens=4, widths=(8,), cu_seqlens=(0, 1, 4)),
        ConvolutionCase(tokens=3, widths=(8, 8), scaled=True),
    ],
)
def test_registration(case: ConvolutionCase) -> None:
    """Fake tensors, autograd and schema of the ops."""
    tensors = case.inputs(0, "cpu")
    dy = tensors["dy"]
    leaves = {key: x.detach().requires_grad_() for key, x in tensors.items() if key not in CONSTANTS}
    starts = None if case.cu_seqlens is None else torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    widths = list(case.widths)
    bias, state, scale = leaves.get("bias"), leaves.get("state"), tensors.get("row_scale")
    arguments = (leaves["x"], leaves["weight"], bias, state, starts, scale, widths)
    torch.library.opcheck(kernels.convolution.op, arguments)
    plain = [None if t is None else t.detach() for t in arguments[:4]]
    parts = [*dy.split(widths, -1), *[dy.new_empty(0)] * (3 - len(widths))]
    torch.library.opcheck(kernels.convolution.backward_op, (*parts, *plain, starts, scale, widths))
