"""swiglu: PyTorch's form on a CPU, and the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from efla_kernels import swiglu
from torch import Tensor

from tests.kernels.test_triton import HERE, run

SHAPES = [(3, 40), (2, 3, 2 * 1030), (1, 2), (5, 2 * 1024)]


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up, with values far outside of sigmoid's range, and dy."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(shape, generator=generator) * 3
    gate_up.view(-1)[::7] *= 40
    dy = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator)
    return gate_up.to(dtype).requires_grad_(), dy.to(dtype)


def truth(gate_up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """y and the gradient of gate_up in float64."""
    leaf = gate_up.detach().double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    y = F.silu(gate) * up
    return y.detach(), torch.autograd.grad(y, leaf, dy.double())[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_pytorch_form_against_float64(shape: tuple[int, ...]) -> None:
    gate_up, dy = case(shape, torch.float32)
    y = swiglu(gate_up)
    for got, expected in zip((y, torch.autograd.grad(y, gate_up, dy)[0]), truth(gate_up, dy), strict=True):
        assert (got - expected).norm() <= 1e-6 * expected.norm()


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"\[\.\.\., 2F\], got torch.float32 \[2, 5\]"):
        swiglu(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"got torch.int64 \[4\]"):
        swiglu(torch.zeros(4, dtype=torch.int64))
    assert swiglu(torch.zeros(0, 6)).shape == (0, 3)


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = run("-m", "pytest", str(HERE / "interpreted_swiglu.py"), "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
