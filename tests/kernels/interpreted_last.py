"""The last token's read-out in Triton's interpreter; run by test_last.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.delta_rule.last_token import RULES, last_weights
from efla_kernels.launch.choices import interpreted
from efla_kernels.selftest.run import poisoned_memory

from tests.kernels.last_cases import inputs, worst_error


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("rule", RULES)
def test_kernels(rule: str, tokens: int) -> None:
    assert interpreted(), "these tests need TRITON_INTERPRET=1"
    with poisoned_memory():
        assert worst_error(rule, tokens, torch.float32, "triton") < 2e-6


def test_without_gradients_nothing_is_kept() -> None:
    q, k, _, *gates = inputs("gated_efla", 9)
    with poisoned_memory():
        found = last_weights("gated_efla", q[:, -1], k, *gates, backend="triton")
    torch.testing.assert_close(found, last_weights("gated_efla", q[:, -1], k, *gates, backend="reference"))


def test_fp64_is_refused() -> None:
    q, k, _, beta = (x.double() for x in inputs("efla", 3))
    with pytest.raises(ValueError, match="fp32 at most"):
        last_weights("efla", q[:, -1], k, beta, backend="triton")
