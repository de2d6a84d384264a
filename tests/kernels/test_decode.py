"""The decoding step in PyTorch against the ops it stands for, and its errors (the kernel: interpreted_decode.py)."""

from __future__ import annotations

import efla_kernels
import pytest
import torch
import torch.nn.functional as F

from tests.kernels.decode_inputs import RULES, decode_inputs


@pytest.mark.parametrize("gated_norm", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_steps_equal_the_op_over_the_sequence(rule: str, gated_norm: bool) -> None:
    """Five steps equal convolution, SiLU, op and norm over five tokens, in float64."""
    steps = [decode_inputs(rule, gated_norm, step=t, dtype=torch.float64) for t in range(5)]
    fixed, options = steps[0][0], steps[0][1]
    conv_state, state = fixed["conv_state"].clone(), fixed["state"].clone()
    outputs = []
    for x, more in steps:
        changing = {"decay_logit": more.get("decay_logit"), "output_gate": more.get("output_gate")}
        outputs.append(
            efla_kernels.decode_step(
                rule, x["x"], conv_state, fixed["conv_weight"], x["beta_logit"], state, fixed["norm_weight"],
                **{**options, **changing},
            )
        )  # fmt: skip
    _, H, K, V = state.shape
    tokens = torch.stack([x["x"] for x, _ in steps], 1)
    padded = torch.cat((fixed["conv_state"], tokens), 1).transpose(1, 2)
    y = F.silu(F.conv1d(padded, fixed["conv_weight"][:, None], groups=padded.shape[1]).transpose(1, 2))
    q, k, v = y.split((H * K, H * K, H * V), -1)
    gates = [torch.stack([x["beta_logit"] for x, _ in steps], 1)]
    if rule.startswith("gated"):
        a = torch.stack([more["decay_logit"] for _, more in steps], 1)
        gates.append(-options["A_log"].exp() * F.softplus(a + options["dt_bias"]))
    q, k, v = (z.unflatten(-1, (H, -1)) for z in (q, k, v))
    o, final = getattr(efla_kernels, rule)(q, k, v, *gates, initial_state=fixed["state"], output_final_state=True)
    expected = F.rms_norm(o, (V,), eps=1e-6) * fixed["norm_weight"]
    if gated_norm:
        expected = expected * F.silu(torch.stack([more["output_gate"] for _, more in steps], 1))
    torch.testing.assert_close(torch.stack(outputs, 1), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state, final, rtol=1e-10, atol=1e-12)
    assert torch.equal(conv_state, tokens[:, -3:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "mamba2"}, "rule: expected one of"),
        ({"state": torch.zeros(2, 3, 8, 16, dtype=torch.bfloat16)}, "state: expected a contiguous fp32"),
        ({"state": torch.zeros(2, 3, 16, 8).transpose(2, 3)}, "not contiguous"),
        ({"x": torch.zeros(2, 95)}, r"x: expected shape \[2, 96\]"),
        ({"conv_state": torch.zeros(2, 3, 96, dtype=torch.bfloat16)}, "conv_state: expected a contiguous tensor"),
        ({"conv_state": torch.zeros(2, 2, 96)}, r"conv_state: expected shape \[2, 3, 96\]"),
        ({"decay_logit": torch.zeros(2, 3)}, "expected none of decay_logit"),
        ({"backend": "reference"}, "expected backend auto, torch or triton"),
    ],
)
def test_errors(change: dict[str, object], message: str) -> None:
    tensors, options = decode_inputs("efla", False)
    with pytest.raises(ValueError, match=message):
        efla_kernels.decode_step(**{"rule": "efla", **tensors, **options, **change})


def test_a_gated_rule_needs_its_decay() -> None:
    tensors, options = decode_inputs("gated_efla", False)
    with pytest.raises(ValueError, match="expected decay_logit, A_log and dt_bias"):
        efla_kernels.decode_step("gated_efla", **tensors, **{**options, "A_log": None})
