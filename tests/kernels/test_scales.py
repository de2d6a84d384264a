"""Raw keys of every size, gates at their ends and narrow inputs: finite everywhere, and close to float64."""

from __future__ import annotations

from collections.abc import Callable

import efla_kernels
import pytest
import torch
from torch import Tensor

from tests.kernels.cases import DELTA_OPS, OPS, assert_close, make_case, relative_errors

FP32 = 1e-5
BF16 = 4e-3  # one rounding to 8 bits of mantissa: what a bf16 result costs when everything before it is fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_scale", [1e-4, 0.01, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("op", ["efla", "gated_efla"])
def test_raw_keys_of_any_scale(op: str, key_scale: float, dtype: torch.dtype) -> None:
    case = make_case(op, 64, key_width=64, value_width=64, key_scale=key_scale, dtype=dtype)
    got, ref = case.run("torch"), case.run("reference", torch.float64)
    assert_close(got, ref, FP32 if dtype == torch.float32 else BF16)
    assert relative_errors(got, ref)["final_state"] <= FP32


@pytest.mark.parametrize("op", DELTA_OPS)
def test_keys_of_mixed_scales(op: str) -> None:
    """Norms from 1e-2 to 1e2 side by side: the solve meets entries up to 1e4, but substitution does not mix them."""
    spread = 10 ** (4 * torch.rand(2, 200, 2, 1, generator=torch.Generator().manual_seed(1)) - 2)
    case = make_case(op, 200, key_width=64, value_width=64, keys=lambda k: k * spread)
    assert_close(case.run("torch"), case.run("reference", torch.float64), FP32)


@pytest.mark.parametrize("key_scale", [0.125, 1.0, 8.0])
@pytest.mark.parametrize("op", DELTA_OPS)
def test_keys_that_nearly_repeat(op: str, key_scale: float) -> None:
    """The worst case of the solve: I + A is almost the matrix of ones below its diagonal. Some gradients are ill
    conditioned there, so the bound is what the fp32 recurrence itself reaches."""
    case = make_case(op, 200, key_width=64, value_width=64, keys=lambda k: k[:, :1] + 1e-2 * k, key_scale=key_scale)
    ref = case.run("reference", torch.float64)
    recurrent = relative_errors(case.run("reference"), ref)
    for name, error in relative_errors(case.run("torch"), ref).items():
        assert error <= max(FP32, 3 * recurrent[name]), (name, error, recurrent[name])


@pytest.mark.parametrize("logit", [-60.0, -30.0, -8.0, 8.0, 17.0, 30.0, 60.0])
@pytest.mark.parametrize("op", DELTA_OPS)
def test_beta_at_its_ends(op: str, logit: float) -> None:
    case = make_case(op, 130, key_scale=0.3, beta_logit=lambda x: 0.1 * x + logit)
    assert_close(case.run("torch"), case.run("reference", torch.float64), FP32)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda u: 0 * u,
    "near one": lambda u: -1e-6 * u,
    "nearly nothing kept": lambda u: -50 * u,
    "nothing kept": lambda u: 0 * u - 1e4,
    "forgets now and then": lambda u: -1e4 * (u > 0.9) - 0.01 * u,
    "g = 0 now and then": lambda u: torch.where(u > 0.9, -torch.inf, -0.01 * u),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("op", ["gated_deltanet", "gated_efla"])
def test_decay_at_its_ends(op: str, gate: str) -> None:
    case = make_case(op, 130, log_g=GATES[gate])
    assert_close(case.run("torch"), case.run("reference", torch.float64), FP32)


@pytest.mark.parametrize("shift", [-40.0, 4.0, 40.0])
def test_mamba_steps_at_their_ends(shift: float) -> None:
    """dt from 1e-17, where nothing happens, to 40, where a state is forgotten at once."""
    case = make_case("mamba2", 130)
    case.inputs["dt_bias"] += shift
    assert_close(case.run("torch"), case.run("reference", torch.float64), FP32, case.key)


def test_g_of_one_is_the_ungated_rule() -> None:
    for gated, plain in (("gated_efla", "efla"), ("gated_deltanet", "deltanet")):
        case = make_case(gated, 130, log_g=lambda u: 0 * u, dtype=torch.float64)
        got = case.run("torch", torch.float64)
        case.op = plain
        case.inputs.pop("log_g")
        got.pop("dlog_g")
        assert_close(got, case.run("torch", torch.float64), 1e-13)


def test_raw_keys_stay_bounded_where_the_euler_step_explodes() -> None:
    case = make_case("efla", 256, key_width=64, value_width=64)
    q, k, v, logit = case.inputs.values()
    beta = torch.sigmoid(logit)
    euler, _ = efla_kernels.delta_rule(q, k, v, beta, beta)
    exact, _ = efla_kernels.efla(q, k, v, logit)
    assert not torch.isfinite(euler).all() or euler.abs().max() > 1e20
    assert exact.abs().max() < 10 * v.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_narrow_inputs_are_up_cast(op: str, dtype: torch.dtype) -> None:
    """Bit for bit the fp32 op on the same numbers, rounded once: no product in 16 bits, not under autocast either."""
    case = make_case(op, 130, dtype=dtype)
    narrow, wide = case.run("torch"), case.run("torch", torch.float32)
    under_autocast = case.run("torch", autocast=True)
    for name, expected in wide.items():
        same = expected if name in ("final_state", "dinitial_state") else expected.to(dtype)
        assert narrow[name].dtype == same.dtype, name
        assert torch.equal(narrow[name], same), name
        assert torch.equal(under_autocast[name], narrow[name]), name
    assert narrow["final_state"].dtype == torch.float32


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("length", [1, 70])
def test_narrow_inputs_of_the_core_ops_are_up_cast(length: int, backend: str) -> None:
    q, k, v, logit, log_g = make_case("gated_efla", length, dtype=torch.bfloat16).inputs.values()
    gate = torch.sigmoid(logit)
    x, dt, _, B, C, *_ = make_case("mamba2", length, dtype=torch.bfloat16).inputs.values()
    calls: list[tuple[Callable[..., tuple[Tensor, Tensor | None]], list[Tensor]]] = [
        (efla_kernels.delta_rule, [q, 0.1 * k, v, gate, gate, log_g]),
        (efla_kernels.ssd, [x, dt.exp(), -dt.exp(), B, C]),
    ]
    for op, narrow in calls:
        o, state = op(*narrow, output_final_state=True, backend=backend)
        expected, expected_state = op(*(t.float() for t in narrow), output_final_state=True, backend=backend)
        assert torch.equal(o, expected.bfloat16()) and torch.equal(state, expected_state)
