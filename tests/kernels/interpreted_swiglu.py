"""The kernels of swiglu in Triton's interpreter; run by test_swiglu.py under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from efla_kernels import swiglu
from efla_kernels.selftest import poisoned_memory
from efla_kernels.triton import swiglu as kernels
from torch import Tensor, nn

from efla_lm.training.activations import keeping
from tests.kernels.test_swiglu import SHAPES, case, truth


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_against_float64(shape: tuple[int, ...]) -> None:
    with poisoned_memory():
        gate_up, dy = case(shape, torch.float32)
        y = swiglu(gate_up, backend="triton")
        (d_gate_up,) = torch.autograd.grad(y, gate_up, dy)
    for got, expected in zip((y, d_gate_up), truth(gate_up, dy), strict=True):
        assert got.shape == expected.shape and got.isfinite().all()
        assert (got - expected).norm() <= 1e-6 * expected.norm()


def test_the_op_is_well_formed() -> None:
    gate_up, _ = case((3, 40), torch.float32)
    torch.library.opcheck(kernels.swiglu, (gate_up,))


class Layer(nn.Module):
    """A SwiGLU MLP around the op."""

    def __init__(self) -> None:
        super().__init__()
        self.backend = "triton"
        self.gate_up = nn.Linear(16, 48, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x), backend=self.backend))


@pytest.mark.parametrize("kind", ["none", "selective", "products", "full"])
def test_compiled_and_checkpointed(kind: str) -> None:
    """As a part of a compiled layer, whatever is kept of it, the gradients are those of PyTorch's own operations."""
    torch.manual_seed(0)
    layer = Layer()
    x, dy = torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    results = []
    for forward in (torch.compile(keeping(layer.forward, kind), fullgraph=True), layer.forward):
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)])
        layer.backend = "torch"
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
