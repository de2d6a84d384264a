"""The table of block shapes: what Triton 3.6 is known to compile to wrong code is never chosen."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.delta_rule import choices
from efla_kernels.delta_rule.choices import MODES, Problem, choose


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("widths", [(64, 64), (64, 128), (128, 64), (128, 128), (256, 256)])
def test_who_has_one_kernel_for_both_gradients(mode: str, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    """It takes all of V at once, in the registers and shared memory of these widths; dR is stored for the rest."""
    decays = mode.startswith("gated")
    problem = Problem(
        batch=1, tokens=64, heads=1, key_width=widths[0], value_width=widths[1], sequences=1, dtype=dtype,
        mode=MODES[mode], decays=decays, packed=False, scale=1.0, segments=1,
    )  # fmt: skip
    fits = widths == (128, 128) and dtype == torch.bfloat16
    assert problem.one_gradient == (fits and mode in ("deltanet", "efla", "gated_efla"))
    assert problem.keeps_adjoint == (not problem.one_gradient or decays)


@pytest.mark.parametrize(
    ("cuda", "capability", "one"),
    [("12.8", (8, 0), False), ("12.8", (8, 9), False), ("12.8", (9, 0), True), ("13.0", (10, 0), False),
     (None, (9, 4), False)],
)  # fmt: skip
def test_one_kernel_needs_hoppers_products(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, capability: tuple[int, int], one: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(choices, "has_wide_products", choices.has_wide_products.__wrapped__)
    problem = Problem(
        batch=1, tokens=64, heads=1, key_width=128, value_width=128, sequences=1, dtype=torch.bfloat16,
        mode=MODES["efla"], decays=False, packed=False, scale=1.0, segments=1,
    )  # fmt: skip
    assert problem.one_gradient == one and problem.keeps_adjoint != one
