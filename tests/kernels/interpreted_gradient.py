"""The gradients of q and k in one kernel (bf16, K = V = 128 on a GPU) in Triton's interpreter, as `interpreted.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import efla_kernels
import pytest
import torch
from efla_kernels.delta_rule import choices, launch
from efla_kernels.delta_rule import triton_op as ops
from efla_kernels.selftest.accuracy import relative_errors

from tests.kernels.interpreted import case, check, poison  # noqa: F401  (a fixture for every test)


@pytest.fixture
def one_gradient(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Gradients of q and k in one kernel, as bf16 has them on a GPU; yields the names of the kernels that ran."""
    choose, run = choices.choose, launch.launch
    one = choices.Block(16, 4, 1)
    ran: set[str] = set()
    monkeypatch.setattr(choices, "choose", lambda *problem: replace(choose(*problem), gradient=one))
    monkeypatch.setattr(launch, "launch", lambda kernel, *a, **b: (ran.add(kernel.fn.__name__), run(kernel, *a, **b)))
    yield ran


FUSED = {"deltanet": "gradient_kernel", "efla": "gradient_kernel", "gated_efla": "gradient_gated_kernel"}
PAIR = {"gradient_q_kernel", "gradient_k_kernel"}


@pytest.mark.parametrize("op", FUSED)
def test_both_gradients_in_one_kernel(one_gradient: set[str], op: str) -> None:
    for tokens, strided in ((1, False), (64, True), (150, False)):
        check(case(op, batch=2, tokens=tokens, heads=2, strided=strided))
    check(case(op, tokens=75, cu_seqlens=(0, 0, 5, 6, 6, 75, 75)))
    check(case(op, key_width=32, key_norm=1e3), 2e-5)
    check(case(op, value_width=32, key_norm=1e-3), 2e-5)
    assert FUSED[op] in one_gradient and not one_gradient & PAIR


@pytest.mark.parametrize("op", FUSED)
def test_both_gradients_in_one_kernel_of_states_computed_again(one_gradient: set[str], op: str) -> None:
    """Bit for bit, dense and packed."""
    for more in ({"tokens": 70}, {"tokens": 75, "cu_seqlens": (0, 0, 5, 6, 6, 75, 75)}):
        again, kept = (check(case(op, **more), backend=backend) for backend in ("triton_recompute", "triton"))
        assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert FUSED[op] in one_gradient and not one_gradient & PAIR


@pytest.mark.usefixtures("one_gradient")
@pytest.mark.parametrize("op", FUSED)
def test_both_gradients_in_one_kernel_of_split_sequences(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    monkeypatch.setattr(ops, "split_segments", lambda *_, **__: 3)
    check(case(op, tokens=300))


@pytest.mark.parametrize("op", ["delta_rule", "gated_deltanet"])
def test_both_gradients_in_two_kernels_elsewhere(one_gradient: set[str], op: str) -> None:
    check(case(op))
    assert not one_gradient & set(FUSED.values()) and one_gradient >= PAIR


@pytest.mark.parametrize("op", FUSED)
def test_no_tokens_start_no_kernel(one_gradient: set[str], op: str) -> None:
    x = case(op, tokens=3).inputs(0, "cpu")
    inputs = [x[name][:, :0] for name in ("q", "k", "v", "beta_logit", "log_g") if name in x]
    initial = x["initial_state"].requires_grad_()
    o, state = getattr(efla_kernels, op)(*inputs, initial_state=initial, output_final_state=True, backend="triton")
    (d_initial,) = torch.autograd.grad(o.sum() + state.sum(), initial)
    assert o.shape == inputs[2].shape and torch.equal(d_initial, torch.ones_like(initial)) and not one_gradient


@pytest.mark.usefixtures("one_gradient")
@pytest.mark.parametrize("op", ["deltanet", "efla"])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("logit", [-20.0, -60.0, -200.0])
def test_coefficients_that_vanish(op: str, norm: float, logit: float) -> None:
    """dL/d ln w is a sum over dV = w dR, divided by w: of every third token w is 2e-9, 1e-26 (so that the sum
    underflows), 0."""
    one = case(op, tokens=100, heads=2, key_norm=norm)
    tensors = one.inputs(0, "cpu")
    tensors["beta_logit"][:, ::3] = logit
    got, truth = one.run(tensors, "triton"), one.truth(tensors)
    assert all(bool(x.isfinite().all()) for x in got.values())
    errors = relative_errors(got, truth)
    assert max(errors.values()) <= 2e-5, errors
    tiny, exact = got["dbeta_logit"][:, ::3], truth["dbeta_logit"][:, ::3]
    bound = 1e-5 if logit == -20.0 else 1.0
    assert (tiny - exact).norm() <= bound * exact.norm() + 1e-20 * got["dbeta_logit"].norm()
