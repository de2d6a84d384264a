"""The benchmark of the layers on a CPU: its definitions are the model's, the course of a run, table and choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from efla_lm.models.norm_linear import GatedRMSNorm, RMSNorm
from scripts.bench.calls import Unserved
from scripts.bench_layers import __main__ as bench_layers
from scripts.bench_layers import report as layer_report
from scripts.bench_layers import run as layer_run
from scripts.bench_layers.calls import EPS, Layer, make_layer
from scripts.bench_layers.settings import LAYERS, LayerBenchSettings

WIDTH, VOCABULARY = 128, 50


def settings(**changes: Any) -> LayerBenchSettings:
    shape = {"batch": 2, "tokens": 12, "hidden": [WIDTH], "vocabulary": VOCABULARY, "dtype": "fp32", "workers": 0}
    return LayerBenchSettings(**{**shape, **changes})


def drawn(name: str) -> tuple[Layer, dict[str, Tensor]]:
    layer = make_layer(name, 2, 12, WIDTH, VOCABULARY)
    generator = torch.Generator().manual_seed(0)
    return layer, layer.draw(lambda *shape: torch.randn(*shape, generator=generator))


@pytest.mark.parametrize("name", ["norm", "gated_norm"])
def test_definitions_are_the_models_layers(name: str) -> None:
    layer, x = drawn(name)
    module = (RMSNorm if name == "norm" else GatedRMSNorm)(WIDTH, EPS)
    module.weight.data.copy_(x["weight"])
    expected = module(x["x"]) if name == "norm" else module(x["x"], x["gate"])
    torch.testing.assert_close(layer.form("torch")(x)[0], expected)


def test_the_truth_of_the_loss_is_its_mean_over_counted_tokens() -> None:
    layer, x = drawn("loss")
    log_p = torch.log_softmax(x["h"].double() @ x["weight"].double().T, -1)
    counted = (x["targets"] >= 0).nonzero().flatten()
    by_hand = -log_p[counted, x["targets"][counted]].mean()
    assert 0 < len(counted) < len(x["targets"])
    for impl, bound in (("truth", 1e-14), ("torch", 1e-6), ("ours", 1e-6)):
        wide = {n: t.double() if impl == "truth" and t.is_floating_point() else t for n, t in x.items()}
        assert abs(layer.form(impl)(wide)[0].item() / by_hand.item() - 1) < bound, impl


def test_flas_convolutions_hold_the_same_numbers_apart() -> None:
    layer, x = drawn("convolution")
    assert layer.apart is not None
    parts = layer.apart(x)
    assert torch.equal(torch.cat([parts[f"x{i}"] for i in range(3)], -1), x["x"])
    assert torch.equal(torch.cat([parts[f"weight{i}"] for i in range(3)]), x["weight"])


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    layer, _ = drawn("norm")
    with pytest.raises(Unserved, match="liger cannot be imported"):
        layer.form("liger")
    with pytest.raises(Unserved, match="no such layer"):
        layer.form("ours")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole course of a run without a clock."""
    monkeypatch.setattr(layer_run, "DEVICE", "cpu")
    times = iter(range(10, 10_000))

    def figures(function: Any, repeats: int) -> dict[str, float]:
        function()
        return {"device_us": float(next(times)), "wall_us": 3.0, "peak_mib": 1.0}

    monkeypatch.setattr(layer_run, "figures", figures)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", LAYERS)
def test_the_course_of_a_run(name: str) -> None:
    chosen = settings(impls=["torch", "cce", "ours"])
    rows = list(layer_run.measure_layer(chosen, name, WIDTH, {(name, "cce"): "too slow"}, float("inf")))
    assert {r["skipped"] for r in rows if "skipped" in r} == {"too slow"}
    timed = [r for r in rows if "device_us" in r]
    assert {r["direction"] for r in timed} == ({"fwd_bwd"} if name == "loss" else {"fwd", "fwd_bwd"})
    assert all(r["right"] for r in timed) and {r["impl"] for r in timed} >= {"torch"}
    assert ("ours" in {r["impl"] for r in timed}) == (name in ("loss", "convolution", "convolution_mamba2", "swiglu"))


@pytest.mark.usefixtures("on_cpu")
def test_nothing_is_timed_while_ours_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_run, "LOSS_BOUND", -1.0)
    (found,) = layer_run.measure_layer(settings(impls=["ours"]), "loss", WIDTH, {}, float("inf"))
    assert found["failed"] and found["skipped"].startswith("wrong, so not timed")


@pytest.mark.usefixtures("on_cpu")
def test_no_row_starts_after_the_budget() -> None:
    rows = list(layer_run.measure_layer(settings(impls=["torch"]), "norm", WIDTH, {}, 0.0))
    assert [r["skipped"] for r in rows] == ["the 170 s of budget_s were over"]


def row(impl: str, us: float, right: bool = True, direction: str = "fwd_bwd") -> dict[str, Any]:
    return {
        "layer": "loss", "impl": impl, "hidden": 1024, "direction": direction, "device_us": us, "right": right,
        "rel_errs": {"loss": 1e-6}, "peak_mib": 100.0,
    }  # fmt: skip


def test_choice_prefers_libraries_at_equal_speed_and_right_ones_always() -> None:
    place = ("loss", 1024)
    assert layer_report.choices([row("compile", 102), row("ours", 100)])[place] == "compile"
    assert layer_report.choices([row("compile", 104), row("ours", 100)])[place] == "ours"
    assert layer_report.choices([row("fla", 50, right=False), row("ours", 100)])[place] == "ours"
    assert layer_report.choices([row("torch", 99), row("liger", 100)])[place] == "liger"


def test_table_and_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit"), "x")
    skipped = {"layer": "loss", "impl": "cce", "hidden": 1024, "direction": "fwd_bwd", "skipped": "missing"}
    result = {
        "environment": environment, "packages": {"liger-kernel": None},
        "settings": {"batch": 8, "tokens": 2048, "dtype": "bf16", "vocabulary": 32000},
        "rows": [row("fla", 300), row("ours", 100), skipped],
    }  # fmt: skip
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(result))
    assert bench_layers.main.run([f"table={file}"]) == 0
    text = capsys.readouterr().out
    assert "| loss | 1024 | **ours** |  | 100 | 1.0e-06 | 100 |" in text
    assert "loss, width 1024, fwd_bwd: 3.00x less device time than fla" in text
    assert "loss, cce, not measured: missing" in text and "liger-kernel missing" in text


@pytest.mark.parametrize("argument", ["layers=[attention]", "impls=[apex]", "hidden=[100]", "tokens=0", "workers=-1"])
def test_values_that_mean_nothing_are_refused(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layers.main.run([argument]) in (1, 2)
    assert "error:" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a GPU")
def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_layers.main.run([]) == 0
    assert "no accelerator" in capsys.readouterr().out
