"""linear_cross_entropy: PyTorch's form on a CPU, and the fused form in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from efla_kernels import linear_cross_entropy
from efla_kernels.layers.cross_entropy import logit_rows

from tests.kernels.interpreter import expect_passes


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_sum_over_counted_rows(dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(7, 8, generator=generator).to(dtype), torch.randn(11, 8, generator=generator).to(dtype)
    targets = torch.tensor([0, 10, -100, 3, 3, -100, 7])
    log_p = torch.log_softmax(hidden.double() @ weight.double().t(), -1)
    by_hand = -sum(log_p[row, target] for row, target in enumerate(targets.tolist()) if target >= 0)
    assert abs(linear_cross_entropy(hidden, weight, targets).item() / by_hand.item() - 1) < bound


def test_shapes_are_checked() -> None:
    hidden, weight, targets = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"hidden \[N, D\] and weight \[V, D\].*\[3, 4\] and \[5, 6\]"):
        linear_cross_entropy(hidden, torch.zeros(5, 6), targets)
    with pytest.raises(ValueError, match=r"targets: expected \[3\].*\[2\]"):
        linear_cross_entropy(hidden, weight, targets[:2])


def test_rows_follow_the_tokens() -> None:
    """2048, from 8 x 4096 tokens on 4096, if they are no more than 1 GiB of fp32 logits; never more than there are."""
    assert [logit_rows(n, 32000) for n in (0, 5, 2048, 16384, 32767, 32768, 49152, 65536, 2**20)] == [
        0, 5, 2048, 2048, 2048, 4096, 4096, 4096, 4096,
    ]  # fmt: skip
    assert [logit_rows(65536, v) for v in (16, 65536, 128256, 2**20)] == [4096, 4096, 2048, 2048]
    assert all(4 * logit_rows(65536, v) * v <= 2**30 for v in (16, 32000, 65536, 128256))


@pytest.mark.timeout(300)
def test_fused_form_in_the_interpreter() -> None:
    expect_passes("interpreted_loss")
