"""The last token's read-out in PyTorch against the op, its errors, and the kernels in a process of their own."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.delta_rule.last_token import CHUNK, RULES, last_weights

from tests.kernels.interpreter import expect_passes
from tests.kernels.last_cases import inputs, worst_error


@pytest.mark.parametrize("tokens", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
@pytest.mark.parametrize("rule", RULES)
def test_chunks_are_the_op(rule: str, tokens: int) -> None:
    assert worst_error(rule, tokens, torch.float64, "torch") < 1e-12
    bound = 1e-5 if rule.startswith("gated") else 2e-6  # a decay's logarithm of -60 has steps of 4e-6 in fp32
    assert worst_error(rule, tokens, torch.float32, "torch") < bound


@pytest.mark.parametrize("rule", RULES)
def test_recurrence_is_the_op(rule: str) -> None:
    assert worst_error(rule, 20, torch.float64, "reference") < 1e-13


def test_large_keys_stay_finite() -> None:
    """Keys a hundred times as long, as under the corruption of intensity: the exact flow keeps the weights bounded."""
    q, k, _, beta = (x.double() for x in inputs("efla", 150))
    truth = last_weights("efla", q[:, -1], 100 * k, beta, backend="reference")
    found = last_weights("efla", q[:, -1].float(), 100 * k.float(), beta.float(), backend="torch")
    assert float((found.double() - truth).norm() / truth.norm()) < 1e-4


def test_errors() -> None:
    q, k, _, beta = inputs("efla", 5)
    with pytest.raises(ValueError, match="rule: expected one of deltanet"):
        last_weights("mamba2", q[:, -1], k, beta)
    with pytest.raises(ValueError, match="gated_efla: expected log_g"):
        last_weights("gated_efla", q[:, -1], k, beta)
    with pytest.raises(ValueError, match="efla: expected no log_g"):
        last_weights("efla", q[:, -1], k, beta, beta)
    with pytest.raises(ValueError, match=r"q: expected shape \[2, 2, 16\]"):
        last_weights("efla", q, k, beta)
    with pytest.raises(ValueError, match=r"beta_logit: expected shape \[2, 5, 2\]"):
        last_weights("efla", q[:, -1], k, beta[:, :4])
    with pytest.raises(ValueError, match="at least one token"):
        last_weights("efla", q[:, -1], k[:, :0], beta[:, :0])
    with pytest.raises(ValueError, match="expected CUDA tensors"):
        last_weights("efla", q[:, -1], k, beta, backend="triton")


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    expect_passes("interpreted_last")
