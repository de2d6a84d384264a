"""What the public ops promise beside numbers: shapes, defaults, decoding, backends, and one clear error per mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import efla_kernels
import pytest
import torch
from efla_kernels import backends
from efla_kernels.delta_rule import chunked
from torch import Tensor

from tests.kernels.cases import DELTA_OPS, OPS, assert_close, make_case


def call(case_op: str, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor | None]:
    return getattr(efla_kernels, case_op)(**inputs, **options)


def tokens(inputs: dict[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
    return {n: x[:, first:last] if x.dim() >= 3 else x for n, x in inputs.items()}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("op", OPS)
def test_any_split_with_the_state_carried_over_is_the_whole(op: str, backend: str) -> None:
    case = make_case(op, 70)
    whole, whole_state = call(op, case.inputs, output_final_state=True, backend=backend)
    for cuts in ([0, 1, 70], [0, 69, 70], [0, 64, 70], [0, 30, 31, 32, 33, 70]):
        state, parts = None, []
        for first, last in pairwise(cuts):
            o, state = call(
                op, tokens(case.inputs, first, last), initial_state=state, output_final_state=True, backend=backend
            )
            parts.append(o)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
        torch.testing.assert_close(state, whole_state, rtol=0, atol=1e-5 * float(whole_state.abs().max()))


@pytest.mark.parametrize("op", OPS)
def test_packed_decoding_of_many_rows(op: str) -> None:
    """One new token for each of several sequences, packed, is the dense step."""
    case = make_case(op, 1, batch=5)
    state = case.state
    dense, dense_state = call(op, case.inputs, initial_state=state, output_final_state=True)
    packed = {n: x.transpose(0, 1) if x.dim() >= 3 else x for n, x in case.inputs.items()}
    o, final = call(op, packed, initial_state=state, output_final_state=True, cu_seqlens=torch.arange(6))
    torch.testing.assert_close(o.transpose(0, 1), dense)
    torch.testing.assert_close(final, dense_state)


def test_shapes_dtypes_and_defaults() -> None:
    case = make_case("gated_efla", 10, key_width=16, value_width=24)
    o, state = call("gated_efla", case.inputs)
    assert o.shape == case.inputs["v"].shape and state is None
    q = case.inputs["q"]
    torch.testing.assert_close(call("gated_efla", case.inputs, scale=16**-0.5)[0], o)
    torch.testing.assert_close(call("gated_efla", case.inputs, scale=1.0)[0], 4 * o)
    torch.testing.assert_close(call("gated_efla", {**case.inputs, "q": 100 * q})[0], o, rtol=1e-4, atol=1e-6)
    _, state = call("gated_efla", {n: x.double() for n, x in case.inputs.items()}, output_final_state=True)
    assert state is not None and state.dtype == torch.float64 and state.shape == (2, 2, 16, 24)


def test_an_initial_state_is_not_written_to() -> None:
    for op in OPS:
        for length in (1, 70):
            case = make_case(op, length)
            before = case.state.clone()
            call(op, case.inputs, initial_state=case.state, output_final_state=True)
            assert torch.equal(case.state, before)


@pytest.mark.parametrize("op", DELTA_OPS)
def test_each_model_is_its_coefficients_in_the_core_rule(op: str) -> None:
    case = make_case(op, 40, dtype=torch.float64)
    q, k, v, logit = (case.inputs[n] for n in ("q", "k", "v", "beta_logit"))
    log_g = case.inputs.get("log_g")
    beta, lam = torch.sigmoid(logit), (k * k).sum(-1)
    unit_q, unit_k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    if op.endswith("deltanet"):
        rule = efla_kernels.delta_rule(unit_q, unit_k, v, beta, beta, log_g)
    elif op == "efla":
        a = (1 - torch.exp(-beta * lam)) / lam
        rule = efla_kernels.delta_rule(unit_q, k, v, a, a)
    else:
        g = torch.exp(log_g)
        eta = (1 - g) + g * beta * lam
        e, w = (1 - torch.exp(-g * beta * lam)) / lam, beta * (1 - torch.exp(-eta)) / eta
        rule = efla_kernels.delta_rule(unit_q, k, v, e, w, g - 1)
    torch.testing.assert_close(call(op, case.inputs)[0], rule[0], rtol=1e-11, atol=1e-13)


def test_a_masked_step_of_mamba_changes_nothing() -> None:
    case = make_case("mamba2", 12)
    mask = torch.ones(2, 12)
    mask[0, :5] = 0
    o, state = call("mamba2", case.inputs, dt_mask=mask.bool(), output_final_state=True)
    rest = {n: x[:1] if x.dim() >= 3 else x for n, x in tokens(case.inputs, 5, 12).items()}
    alone, alone_state = call("mamba2", rest, output_final_state=True)
    torch.testing.assert_close(o[:1, 5:], alone)
    torch.testing.assert_close(state[:1], alone_state)


def test_ssd_is_the_core_of_mamba() -> None:
    case = make_case("mamba2", 70, dtype=torch.float64)
    x, dt, A_log, B, C, D, dt_bias = case.inputs.values()
    step = torch.log1p(torch.exp(dt + dt_bias))
    y, _ = efla_kernels.ssd(x, step, -torch.exp(A_log) * step, B, C)
    torch.testing.assert_close(call("mamba2", case.inputs)[0], y + D[:, None] * x)


@pytest.mark.parametrize("op", OPS)
def test_compiles_without_a_graph_break(op: str) -> None:
    case = make_case(op, 70)
    eager = case.run("torch")
    compiled = torch.compile(getattr(efla_kernels, op), backend="aot_eager", fullgraph=True)
    o, final = compiled(**case.inputs, initial_state=case.state, output_final_state=True)
    torch.testing.assert_close(o, eager["o"])
    torch.testing.assert_close(final, eager["final_state"])


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda inputs: {**inputs, name: change(inputs[name])}


@pytest.mark.parametrize(
    ("op", "change", "options", "message"),
    [
        ("efla", changed("q", lambda x: x[0]), {}, r"q: expected .*\[B, T, H, K\].*got"),
        ("efla", changed("k", lambda x: x[..., :4]), {}, r"k: expected shape \[2, 6, 2, 16\].*got \[2, 6, 2, 4\]"),
        ("efla", changed("v", lambda x: x[:, :5]), {}, r"v: expected shape \[2, 6, 2, 24\]"),
        ("efla", changed("beta_logit", lambda x: x[..., None]), {}, r"beta_logit: expected shape \[2, 6, 2\]"),
        ("gated_efla", changed("log_g", lambda x: x[:, :, :1]), {}, r"log_g: expected shape"),
        ("efla", changed("q", lambda x: x.long()), {}, "q: expected a floating point tensor"),
        ("efla", changed("k", lambda x: x.long()), {}, "k: expected a floating point tensor"),
        ("mamba2", changed("A_log", lambda x: x[:3]), {}, r"A_log: expected shape \[4\] = \[H\]"),
        ("mamba2", changed("C", lambda x: x[:, :, :1]), {}, "C: expected shape"),
        ("mamba2", lambda i: {**i, "B": i["B"].repeat(1, 1, 3, 1)[:, :, :3], "C": i["C"].repeat(1, 1, 3, 1)[:, :, :3]},
         {}, "divides H=4, got G=3"),
        ("mamba2", dict, {"dt_mask": torch.ones(2, 5)}, r"dt_mask: expected shape \[2, 6\]"),
        ("efla", dict, {"initial_state": torch.zeros(1, 2, 16, 24)}, r"initial_state: .*N = batch size, got \[1, 2"),
    ],
)  # fmt: skip
def test_bad_arguments(
    op: str, change: Callable[..., dict[str, Tensor]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(op, change(make_case(op, 6).inputs), **options)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("offsets", [[0, 7], [1, 6], [0, 4, 3, 6], [6], [[0, 6]], [0.0, 6.0]], ids=str)
def test_bad_segment_offsets(op: str, backend: str, offsets: list[Any]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        call(op, make_case(op, 6, batch=1).inputs, cu_seqlens=torch.tensor(offsets), backend=backend)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("op", OPS)
def test_packing_needs_batch_size_1(op: str, backend: str) -> None:
    """Else the boundaries would be those of which row?"""
    with pytest.raises(ValueError, match="batch size 1, got batch size 2; flatten the batch"):
        call(op, make_case(op, 6).inputs, cu_seqlens=torch.tensor([0, 6]), backend=backend)


def test_a_state_per_segment_is_expected() -> None:
    inputs = make_case("efla", 6, batch=1).inputs
    with pytest.raises(ValueError, match=r"expected shape \[3, .*N = segments of cu_seqlens"):
        call("efla", inputs, cu_seqlens=torch.tensor([0, 2, 2, 6]), initial_state=torch.zeros(1, 2, 16, 24))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "_BACKENDS", dict(backends._BACKENDS))
    yield


def test_backend_names() -> None:
    assert efla_kernels.resolve_backend("auto", "cpu") == "torch"
    assert efla_kernels.resolve_backend("auto", "cpu", "mamba2") == "torch"
    assert efla_kernels.resolve_backend("reference", "cuda", "efla") == "reference"
    with pytest.raises(ValueError, match=r"'tirton' is unknown.*expected one of auto, torch, reference"):
        call("efla", make_case("efla", 3).inputs, backend="tirton")
    with pytest.raises(ValueError, match="op: expected one of delta_rule"):
        efla_kernels.resolve_backend("auto", "cpu", "flash")


def test_a_registered_backend_is_used_and_only_for_what_it_offers(registry: None) -> None:
    calls = []

    def fused_efla(q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, **options: Any) -> tuple[Tensor, None]:
        calls.append((beta_logit, options))
        return v, None

    efla_kernels.register_backend("mine", SimpleNamespace(efla=fused_efla))
    inputs = make_case("efla", 3).inputs
    o, _ = call("efla", inputs, backend="mine")
    ((logit, options),) = calls
    assert o is inputs["v"] and logit is inputs["beta_logit"]
    assert options == {"scale": 0.25, "initial_state": None, "output_final_state": False, "cu_seqlens": None}
    with pytest.raises(ValueError, match="backend 'mine' is not built for 'gated_efla'; expected one of auto, torch"):
        call("gated_efla", make_case("gated_efla", 3).inputs, backend="mine")
    # a core op serves every model of its kind, with the coefficients computed by the caller
    efla_kernels.register_backend("core", SimpleNamespace(delta_rule=chunked.delta_rule))
    for op in DELTA_OPS:
        case = make_case(op, 70)
        assert_close(case.run("core"), case.run("torch"), 0.0)
    with pytest.raises(ValueError, match="backend 'core' is not built for 'mamba2'"):
        call("mamba2", make_case("mamba2", 3).inputs, backend="core")


def test_auto_on_cuda_takes_triton_for_the_ops_it_serves(registry: None) -> None:
    backends._BACKENDS.pop("triton", None)
    assert efla_kernels.resolve_backend("auto", "cuda", "efla") == "torch"
    with pytest.raises(ValueError, match="'triton' is not built for 'efla'"):
        efla_kernels.resolve_backend("triton", "cpu", "efla")
    efla_kernels.register_backend("triton", SimpleNamespace(efla=chunked.delta_rule))
    assert efla_kernels.resolve_backend("auto", "cuda", "efla") == "triton"
    assert efla_kernels.resolve_backend("auto", "cuda", "mamba2") == "torch"
    assert efla_kernels.resolve_backend("auto", "cpu", "efla") == "torch"


def test_registering_nothing_useful_is_refused(registry: None) -> None:
    with pytest.raises(ValueError, match="reserved"):
        efla_kernels.register_backend("auto", chunked)
    with pytest.raises(ValueError, match="got none of them"):
        efla_kernels.register_backend("empty", SimpleNamespace(delta=chunked.delta_rule))
