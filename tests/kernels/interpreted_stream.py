"""The kernels of `tests/kernels/test_stream.py` in Triton's interpreter; run by it under TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.selftest.run import poisoned_memory

from tests.kernels.test_stream import run


@pytest.mark.parametrize("rows", [(2, 9), (1,), (3, 0)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_two_blocks_against_float64(dtype: torch.dtype, bound: float, compiled: bool, rows: tuple[int, ...]) -> None:
    with poisoned_memory():
        run(dtype, bound, "triton", compiled, rows)
