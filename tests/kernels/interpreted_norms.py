"""The kernels of the norms in Triton's interpreter; run by test_norms.py under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.layers.norm_linear import norm_linear_op
from efla_kernels.layers.unit_norm import unit_norm_op
from efla_kernels.selftest.run import poisoned_memory

from tests.kernels.test_norms import EPS, SHAPES, Shape, case, check, check_unit, ours, truth


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", [*SHAPES, Shape((70,), 1030, (3,), 8), Shape((5,), 1030, (3,), 0)])
def test_kernels_against_float64(shape: Shape, dtype: torch.dtype, bound: float) -> None:
    """16-bit inputs are up-cast: the interpreter multiplies bf16 as bit patterns."""
    leaves, slopes = case(shape, dtype)
    with poisoned_memory():
        got = ours(leaves, slopes, "triton")
    check(got, truth(leaves, slopes), dtype, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 128), (7, 40), (1, 3), (33, 2, 64)])
def test_unit_norm_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    with poisoned_memory():
        check_unit(shape, dtype, "triton", 1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_ops_are_well_formed(shape: Shape, kernels: bool) -> None:
    leaves, _ = case(shape, torch.float32)
    flat = {name: t.detach().reshape(-1, shape.D).requires_grad_() for name, t in leaves.items()}
    inputs = [flat.get(name) for name in ("h", "weight0", "weight1", "narrow")]
    torch.library.opcheck(norm_linear_op.op, (*inputs, EPS, kernels))
    torch.library.opcheck(unit_norm_op.op, (flat["h"], EPS, kernels))
    y = torch.randn_like(flat["h"])
    torch.library.opcheck(unit_norm_op.backward_op, (torch.randn_like(y), y, torch.rand(len(y)), kernels))
