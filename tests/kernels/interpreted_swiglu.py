"""The kernels of swiglu_linear in Triton's interpreter; run by test_swiglu.py under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from efla_kernels import swiglu_linear
from efla_kernels.layers import swiglu_kernels as kernels
from efla_kernels.selftest.run import poisoned_memory
from torch import Tensor

from efla_lm.models.layers import SwiGLU
from efla_lm.parallel.activation_checkpointing import checkpointed
from tests.kernels.test_swiglu import SHAPES, case, factors, truth


@pytest.mark.parametrize(("scaled", "autocast"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_against_float64(shape: tuple[int, ...], scaled: bool, autocast: bool) -> None:
    row_scale = factors(shape, scaled)
    with poisoned_memory():
        gate_up, weight, dy = case(shape, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = swiglu_linear(gate_up, weight, row_scale=row_scale, backend="triton")
        gradients = torch.autograd.grad(y, (gate_up, weight), dy)
    for got, expected in zip((y, *gradients), truth(gate_up, weight, dy, row_scale), strict=True):
        assert got.shape == expected.shape and got.isfinite().all()
        assert (got - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_16_bit_inputs_are_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, bound: float) -> None:
    """Up-cast, since the interpreter multiplies bf16 as bit patterns; results come in the inputs' type."""
    gate_up, weight, dy = case(shape, torch.float32)
    shrunk = gate_up.detach() / 40  # fp16 holds all results
    gate_up, weight, dy = shrunk.to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_(), dy.to(dtype)
    with poisoned_memory():
        y = swiglu_linear(gate_up, weight, backend="triton")
        gradients = torch.autograd.grad(y, (gate_up, weight), dy)
    for got, expected in zip((y, *gradients), truth(gate_up, weight, dy), strict=True):
        assert got.dtype == dtype and (got - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("scaled", [False, True])
def test_the_backward_pass_has_the_product_of_the_forward_pass(scaled: bool) -> None:
    """With W = 1 y is h, and so is dW with dy = 1."""
    gate_up, row_scale = case((40, 80), torch.float32)[0].detach(), factors((40, 80), scaled)
    _, d_weight = kernels.swiglu_op.backward_op(torch.eye(40), gate_up, torch.eye(40), row_scale)
    assert torch.equal(d_weight, kernels.swiglu_op.op(gate_up, torch.eye(40), row_scale, None, None))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_ops_are_well_formed(scaled: bool) -> None:
    gate_up, weight, dy = case((3, 40), torch.float32)
    row_scale = factors((3, 40), scaled)
    for stream in ((None, None), (torch.randn(dy.shape), torch.zeros(dy.shape, requires_grad=True))):
        torch.library.opcheck(kernels.swiglu_op.op, (gate_up, weight, row_scale, *stream))
    torch.library.opcheck(kernels.swiglu_op.backward_op, (dy, gate_up.detach(), weight.detach(), row_scale))


@pytest.mark.parametrize("kind", ["none", "selective", "products", "full"])
@pytest.mark.parametrize("compiled", [True, False])
def test_checkpointed(compiled: bool, kind: str) -> None:
    """As a part of a layer, whatever is kept of it, the gradients are those of PyTorch's own operations."""
    torch.manual_seed(0)
    layer = SwiGLU(16, 24, backend="triton")
    x, dy = torch.randn(2, 5, 16), torch.randn(2, 5, 16)

    def block(hidden: Tensor) -> Tensor:
        return hidden + layer(hidden)

    kept = checkpointed(block, kind)
    results = []
    for forward in (torch.compile(kept, fullgraph=True) if compiled else kept, block):
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)])
        layer.backend = "torch"
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
