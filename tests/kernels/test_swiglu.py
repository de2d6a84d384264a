"""swiglu_linear: PyTorch's form on a CPU, and the kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from efla_kernels import swiglu_linear
from torch import Tensor

from tests.kernels.test_triton import HERE, run

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


def truth(gate_up: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """y and the gradients of gate_up and W in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (gate_up, weight)]
    gate, up = leaves[0].chunk(2, -1)
    y = F.linear(F.silu(gate) * up, leaves[1])
    return y.detach(), *torch.autograd.grad(y, leaves, dy.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_pytorch_form_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up, weight, dy = case(shape, dtype)
    y = swiglu_linear(gate_up, weight)
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    got = (y, *torch.autograd.grad(y, (gate_up, weight), dy))
    for x, expected in zip(got, truth(gate_up, weight, dy), strict=True):
        assert x.dtype == dtype and (x - expected).norm() <= bound * expected.norm()


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
    assert swiglu_linear(torch.zeros(0, 6), torch.zeros(5, 3)).shape == (0, 5)


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = run("-m", "pytest", str(HERE / "interpreted_swiglu.py"), "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
