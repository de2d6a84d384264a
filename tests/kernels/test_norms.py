"""norm_linear and unit_rms_norm: PyTorch's form on a CPU, and the kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from efla_kernels import norm_linear, unit_rms_norm
from torch import Tensor

from tests.kernels.interpreter import expect_passes

EPS = 1e-3  # large enough to matter in rows of small numbers


class Shape(NamedTuple):
    """h [*rows, D], the rows O of each wide matrix, G of the narrow one; goes_on: h is read behind its norm too."""

    rows: tuple[int, ...]
    D: int
    O: tuple[int, ...]
    G: int
    goes_on: bool = True


SHAPES = [
    Shape((2, 35), 48, (7, 5), 3),
    Shape((33,), 130, (9,), 16),
    Shape((5,), 256, (4,), 0),
    Shape((3, 3), 64, (6, 2), 0, goes_on=False),
    Shape((1,), 1, (1,), 1),
    Shape((65,), 200, (3,), 17, goes_on=False),
]


def case(shape: Shape, dtype: torch.dtype) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The inputs by name, and the gradients of h where it goes on (in front), logits and the scaled products."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    x = normal(*shape.rows, shape.D)
    x.view(-1, shape.D)[::3] *= 1e-2
    x.view(-1, shape.D)[1::5] *= 30
    leaves = {"h": x}
    leaves |= {f"weight{i}": normal(O, shape.D) for i, O in enumerate(shape.O)}
    if shape.G:
        leaves["narrow"] = normal(shape.G, shape.D)
    sizes = [*([shape.D] if shape.goes_on else []), *([shape.G] if shape.G else []), *shape.O]
    return {name: t.requires_grad_() for name, t in leaves.items()}, [normal(*shape.rows, size) for size in sizes]


def with_gradients(results: Sequence[Tensor], leaves: dict[str, Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(results, list(leaves.values()), slopes)
    return {str(i): y.detach() for i, y in enumerate(results)} | dict(zip(leaves, gradients, strict=True))


def ours(
    leaves: dict[str, Tensor], slopes: Sequence[Tensor], backend: str = "auto", autocast: bool = False
) -> dict[str, Tensor]:
    """h (if its gradient is in `slopes`), logits and the products times r, and all gradients: the consumer's factor is
    a constant to it."""
    weights = [t for name, t in leaves.items() if name.startswith("weight")]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stream, raws, r, logits = norm_linear(leaves["h"], weights, leaves.get("narrow"), eps=EPS, backend=backend)
    assert not r.requires_grad and not stream.values.requires_grad
    products = [(raw * r[..., None]).to(raw.dtype) for raw in raws]
    results = [*([] if logits is None else [logits]), *products]
    if len(slopes) > len(results):
        results.insert(0, stream.add(torch.zeros_like(stream.values)))
    return with_gradients(results, leaves, slopes)


def truth(leaves: dict[str, Tensor], slopes: Sequence[Tensor]) -> dict[str, Tensor]:
    """The plain formula in float64."""
    wide = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    h = wide["h"]
    normed = F.rms_norm(h, h.shape[-1:], eps=EPS)
    maps = [wide["narrow"]] if "narrow" in wide else []
    maps += [t for name, t in wide.items() if name.startswith("weight")]
    results = [normed @ w.t() for w in maps]
    if len(slopes) > len(results):
        results.insert(0, h + 0)
    return with_gradients(results, wide, [t.double() for t in slopes])


def check(got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, bound: float) -> None:
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert got[name].dtype == dtype and got[name].shape == t.shape, name
        assert (got[name] - t).norm() <= bound * t.norm(), (name, ((got[name] - t).norm() / t.norm()).item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_pytorch_form_against_float64(shape: Shape, dtype: torch.dtype) -> None:
    leaves, slopes = case(shape, dtype)
    check(ours(leaves, slopes), truth(leaves, slopes), dtype, 2e-6 if dtype == torch.float32 else 1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_16_bits_on_a_cpu(shape: Shape) -> None:
    leaves, slopes = case(shape, torch.bfloat16)
    check(ours(leaves, slopes), truth(leaves, slopes), torch.bfloat16, 1e-2)


@pytest.mark.parametrize("present", range(4))
def test_results_without_a_gradient(present: int) -> None:
    """Any of h, logits and the two products may be left unread."""
    leaves, slopes = case(SHAPES[0], torch.float64)
    found = []
    for form in (ours, truth):
        leaf = {name: t.detach().requires_grad_() for name, t in leaves.items()}
        only = [t if i == present else torch.zeros_like(t) for i, t in enumerate(slopes)]
        if form is truth:
            found.append(truth(leaf, only))
            continue
        weights = [leaf["weight0"], leaf["weight1"]]
        stream, raws, r, logits = norm_linear(leaf["h"], weights, leaf["narrow"], eps=EPS)
        assert logits is not None
        result = [stream.add(torch.zeros(())), logits, *(raw * r[..., None] for raw in raws)][present]
        gradients = torch.autograd.grad(result, list(leaf.values()), slopes[present], materialize_grads=True)
        found.append(dict(zip(leaf, gradients, strict=True)))
    for name, t in found[0].items():
        torch.testing.assert_close(t, found[1][name], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 128), (7, 40), (1, 3)])
def test_unit_norm_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_unit(shape, dtype, "auto", {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype])


def check_unit(shape: tuple[int, ...], dtype: torch.dtype, backend: str, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x[..., 0] *= 3
    results = []
    for leaf, slope in ((x, dy), (x.double(), dy.double())):
        leaf = leaf.clone().requires_grad_()
        wide = leaf.dtype == torch.float64 and dtype != torch.float64
        y = F.rms_norm(leaf, leaf.shape[-1:], eps=EPS) if wide else unit_rms_norm(leaf, eps=EPS, backend=backend)
        results.append(with_gradients([y], {"x": leaf}, [slope]))
    check(results[0], results[1], dtype, bound)


def test_autocast_changes_nothing() -> None:
    leaves, slopes = case(SHAPES[0], torch.float32)
    under = ours(leaves, slopes, autocast=True)
    for name, t in ours(leaves, slopes).items():
        assert torch.equal(t, under[name]), name


def test_what_does_not_fit_is_named() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"weights: expected torch.float32 \[O, 4\], got torch.float32 \[3, 5\]"):
        norm_linear(x, [torch.zeros(3, 5)], eps=EPS)
    with pytest.raises(ValueError, match=r"weights: expected torch.float32 \[O, 4\], got torch.float64 \[3, 4\]"):
        norm_linear(x, [torch.zeros(3, 4)], torch.zeros(3, 4, dtype=torch.float64), eps=EPS)
    with pytest.raises(ValueError, match="expected one or two matrices"):
        norm_linear(x, [torch.zeros(3, 4)] * 3, eps=EPS)
    with pytest.raises(ValueError, match=r"\[\.\.\., D\], got torch.int64"):
        norm_linear(x.long(), [torch.zeros(3, 4)], eps=EPS)
    with pytest.raises(ValueError, match=r"\[\.\.\., D\], got torch.int64"):
        unit_rms_norm(x.long(), eps=EPS)
    assert norm_linear(x[:0], [torch.zeros(3, 4)], eps=EPS)[1][0].shape == (0, 3)


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    expect_passes("interpreted_norms")
