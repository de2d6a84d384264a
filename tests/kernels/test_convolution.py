"""short_convolution: PyTorch's form on a CPU, and the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from efla_kernels import convolution_state, short_convolution
from efla_kernels.layers.convolution import convolution_backend
from efla_kernels.selftest.rows_layers import CONVOLUTIONS

from tests.kernels.interpreter import expect_passes


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_pytorch_form_against_float64(name: str) -> None:
    errors = CONVOLUTIONS[name].errors("torch")
    assert all(error <= 1e-6 for error in errors.values()), errors


def test_next_state_is_the_last_inputs() -> None:
    x, state = torch.arange(10.0).view(1, 5, 2), torch.full((1, 3, 2), -1.0)
    assert torch.equal(convolution_state(x, 4), x[:, 2:])
    assert torch.equal(convolution_state(x[:, :1], 4, state), torch.cat((state[:, 1:], x[:, :1]), 1))
    assert torch.equal(convolution_state(x[:, :2], 4)[:, 0], torch.zeros(1, 2))
    assert convolution_state(x, 1).shape == (1, 0, 2)


def test_what_does_not_fit_is_named() -> None:
    x, weight = torch.zeros(2, 5, 6), torch.zeros(6, 4)
    with pytest.raises(ValueError, match=r"weight: expected shape \[6, 4\] = \[D, W\], got \[5, 4\]"):
        short_convolution(x, torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"add up to D=6, got \[2, 2\]"):
        short_convolution(x, weight, widths=(2, 2))
    with pytest.raises(ValueError, match=r"state: expected shape \[2, 3, 6\] = \[B, W-1, D\], got \[2, 4, 6\]"):
        short_convolution(x, weight, state=torch.zeros(2, 4, 6))
    with pytest.raises(ValueError, match="batch size 1, got batch size 2"):
        short_convolution(x, weight, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="start from nothing"):
        short_convolution(x[:1], weight, state=torch.zeros(1, 3, 6), cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match=r"row_scale: expected shape \[2, 5\] = \[B, T\], got \[2, 5, 1\]"):
        short_convolution(x, weight, row_scale=torch.ones(2, 5, 1))
    with pytest.raises(ValueError, match=r"row_scale: expected torch\.float32, got torch\.bfloat16"):
        short_convolution(x, weight, row_scale=torch.ones(2, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="scale x itself"):
        short_convolution(x, weight, row_scale=torch.ones(2, 5), state=torch.zeros(2, 3, 6))


def test_factors_of_rows_are_constants() -> None:
    """x's gradient is that of the scaled rows, and the factors get none."""
    x, weight = torch.randn(2, 5, 6, requires_grad=True), torch.randn(6, 4)
    factors = torch.rand(2, 5, requires_grad=True)
    (y,) = short_convolution(x, weight, row_scale=factors)
    (expected,) = short_convolution(x * factors.detach()[..., None], weight)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    assert factors.grad is None
    assert torch.equal(x.grad, torch.autograd.grad(expected.square().sum(), x)[0])


def test_no_tokens_and_no_rows() -> None:
    weight = torch.ones(6, 4, requires_grad=True)
    for shape in ((2, 0, 6), (0, 5, 6)):
        x = torch.zeros(shape, requires_grad=True)
        parts = short_convolution(x, weight, widths=(4, 2))
        assert [part.shape for part in parts] == [(*shape[:2], 4), (*shape[:2], 2)]
        dx, d_weight = torch.autograd.grad(sum(part.sum() for part in parts), (x, weight))
        assert dx.shape == x.shape and not d_weight.any()


def test_a_cpu_takes_pytorch_whatever_the_backend() -> None:
    x = torch.zeros(1, 1, 1)
    assert {convolution_backend(name, x, 4) for name in ("auto", "torch", "reference", "fla")} == {"torch"}


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    expect_passes("interpreted_convolution")
