"""swiglu_linear: PyTorch's form on a CPU, and the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from efla_kernels import swiglu_linear
from torch import Tensor

from tests.kernels.interpreter import expect_passes

SHAPES = [(3, 40), (2, 3, 2 * 1030), (1, 2), (2, 2 * 7), (6,), (2, 2 * 1023), (5, 2 * 1024)]
OUTPUTS = 7


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """gate_up, with values far outside of sigmoid's range, W and dy."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(shape, generator=generator) * 3
    gate_up.view(-1)[::7] *= 40
    weight = torch.randn(OUTPUTS, shape[-1] // 2, generator=generator)
    dy = torch.randn(*shape[:-1], OUTPUTS, generator=generator)
    return gate_up.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), dy.to(dtype)


def factors(shape: tuple[int, ...], scaled: bool) -> Tensor | None:
    """A factor of each row of gate_up, as an RMS norm has them; or none."""
    if not scaled:
        return None
    return torch.rand(shape[:-1], generator=torch.Generator().manual_seed(1)) * 1.5 + 0.01


def truth(gate_up: Tensor, weight: Tensor, dy: Tensor, row_scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """y and the gradients of gate_up and W in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (gate_up, weight)]
    scaled = leaves[0] if row_scale is None else leaves[0] * row_scale.double()[..., None]
    gate, up = scaled.chunk(2, -1)
    y = F.linear(F.silu(gate) * up, leaves[1])
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_pytorch_form_against_float64(shape: tuple[int, ...], dtype: torch.dtype, scaled: bool) -> None:
    gate_up, weight, dy = case(shape, dtype)
    row_scale = factors(shape, scaled)
    y = swiglu_linear(gate_up, weight, row_scale=row_scale)
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    got = (y, *torch.autograd.grad(y, (gate_up, weight), dy))
    for x, expected in zip(got, truth(gate_up, weight, dy, row_scale), strict=True):
        assert x.dtype == dtype and (x - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_rows_are_not_rounded(dtype: torch.dtype) -> None:
    """16-bit rows times a factor of fp32 are fp32 as far as the product."""
    generator = torch.Generator().manual_seed(2)
    gate_up, weight = (torch.randn(s, generator=generator).to(dtype) for s in ((30, 80), (OUTPUTS, 40)))
    row_scale = factors((30, 80), True)
    y = swiglu_linear(gate_up, weight, row_scale=row_scale)
    expected = truth(gate_up, weight, torch.zeros(30, OUTPUTS), row_scale)[0]
    assert y.dtype == dtype and (y - expected).norm() <= (4e-3 if dtype == torch.bfloat16 else 5e-4) * expected.norm()


def test_factors_of_rows_are_constants() -> None:
    gate_up, weight, dy = case(SHAPES[0], torch.float32)
    row_scale = factors(SHAPES[0], True).requires_grad_()
    swiglu_linear(gate_up, weight, row_scale=row_scale).backward(dy)
    assert row_scale.grad is None and gate_up.grad is not None


def test_autocast_changes_nothing() -> None:
    gate_up, weight, dy = case(SHAPES[0], torch.float32)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = swiglu_linear(gate_up, weight)
        results.append((y, *torch.autograd.grad(y, (gate_up, weight), dy)))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[\.\.\., 2F\], got torch.float32 \[2, 5\]"):
        swiglu_linear(torch.zeros(2, 5), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"got torch.int64 \[4\]"):
        swiglu_linear(torch.zeros(4, dtype=torch.int64), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"weight: expected torch.float32 \[D, 2\], got torch.float32 \[3, 4\]"):
        swiglu_linear(torch.zeros(2, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"expected torch.float32 \[D, 2\], got torch.float64 \[3, 2\]"):
        swiglu_linear(torch.zeros(2, 4), torch.zeros(3, 2, dtype=torch.float64))
    for wrong in (torch.ones(2, 1), torch.ones(3), torch.ones(2, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"row_scale: expected torch.float32 \[2\], one factor for each row"):
            swiglu_linear(torch.zeros(2, 4), torch.zeros(3, 2), row_scale=wrong)
    assert swiglu_linear(torch.zeros(0, 6), torch.zeros(5, 3)).shape == (0, 5)
    assert swiglu_linear(torch.zeros(0, 6), torch.zeros(5, 3), row_scale=torch.ones(0)).shape == (0, 5)


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    expect_passes("interpreted_swiglu")
