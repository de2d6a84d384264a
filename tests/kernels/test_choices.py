"""The table of block shapes: what Triton 3.6 is known to compile to wrong code is never chosen."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.triton.choices import MODES, Problem, choose


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("key_width", [16, 20, 32, 36, 64, 100, 128, 192, 256])
@pytest.mark.parametrize("value_width", [16, 20, 32, 36, 64, 100, 128, 192, 256])
def test_narrow_16_bit_blocks_lie_in_pipelined_loops(key_width: int, value_width: int, decays: bool) -> None:
    """Fewer than 64 columns need a loop of two trips or more, of two stages or more, over rows of whole 16 bytes."""
    problem = Problem(
        batch=1, tokens=64, heads=1, key_width=key_width, value_width=value_width, sequences=1, dtype=torch.bfloat16,
        mode=MODES["gated_efla" if decays else "efla"], decays=decays, packed=False, scale=1.0, segments=1,
    )  # fmt: skip
    choice = choose(key_width, value_width, torch.bfloat16, decays)
    for inside, blocks in (
        (True, (choice.gradient_q, choice.gradient_k)),
        (False, (choice.scan, choice.scan_backward, choice.transition)),
    ):
        for block in blocks:
            columns = problem.width(block, inside)["BV"]
            pipelined = block.stages > 1 and not (key_width % 8 or value_width % 8)
            pipelined &= value_width > columns or not inside
            assert columns >= 64 or pipelined, (block, columns)
