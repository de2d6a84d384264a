"""The benchmark on a CPU: which op of fla stands for which of ours, the result file's table and plot, the command."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from efla_kernels.selftest.accuracy import relative_errors

from efla_lm.errors import UserError
from scripts.bench import __main__ as bench
from scripts.bench import calls, decoding, mamba_calls, measure, report, run
from scripts.bench.settings import WIDEST, BenchSettings
from scripts.bench.timing import Timing


def small(op: str) -> run.Shape:
    return run.Shape(op, batch=1, tokens=20, heads=2, width=16, dtype="fp32")


def naive(op: str) -> Any:
    """fla's PyTorch recurrences in the place of its kernels, which need a GPU."""
    if op == "gated_efla":
        return pytest.importorskip("fla.ops.gdn2.naive").naive_recurrent_gdn2
    if op == "mamba2":
        return pytest.importorskip("fla.ops.simple_gla.naive").naive_chunk_simple_gla

    def rule(q, k, v, beta, g=None, use_qk_l2norm_in_kernel=False):
        # delta_rule's kernels in the words of the other naive form: one gate for all channels
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        decay = torch.zeros_like(q) if g is None else g.unsqueeze(-1).expand_as(q)
        return naive("gated_efla")(q, k, v, decay, *2 * [beta.unsqueeze(-1).expand_as(q)])

    return rule


@pytest.mark.parametrize("op", ["deltanet", "efla", "gated_deltanet", "gated_efla"])
def test_flas_op_computes_ours(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Output and every gradient from the logits on, and the timed call gives the same output."""
    monkeypatch.setattr(calls, "_fla_kernel", naive)
    case = small(op).case()
    tensors = case.inputs(0, "cpu")
    truth = case.truth(tensors)
    call = calls.make_call(op, "fla", tensors)
    got = run.outputs(call, tensors, calls.names(op))
    assert max(relative_errors(got, truth).values()) < 1e-5
    assert max(relative_errors({"o": call.timed(call.leaves)}, {"o": truth["o"]}).values()) < 1e-5


def test_simple_gla_with_repeated_b_and_c_is_mamba2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and every gradient; what is timed is the rule without the skip."""
    monkeypatch.setattr(calls, "_fla_kernel", naive)
    case = small("mamba2").case()
    tensors = case.inputs(0, "cpu")
    truth = case.truth(tensors)
    call = calls.make_call("mamba2", "fla", tensors)
    assert max(relative_errors(run.outputs(call, tensors, calls.names("mamba2")), truth).values()) < 1e-5
    y = call.timed(call.leaves) + tensors["D"].unsqueeze(-1) * tensors["x"]
    assert relative_errors({"o": y}, {"o": truth["o"]})["o"] < 1e-5


@pytest.fixture
def mamba_ssm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as mamba-ssm's archive has it, with its functions' signatures around our PyTorch."""
    folder = tmp_path / "mamba_ssm" / "ops" / "triton"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm" / "__init__.py").write_text("raise ImportError('no CUDA extension')")
    (folder / "ssd_combined.py").write_text(
        "import efla_kernels\n"
        "class Tuner:\n"
        "    configs = list(range(10))\n"
        "Tuner.__module__ = 'triton.runtime.autotuner'\n"
        "kernel = Tuner()\n"
        "def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False):\n"
        "    assert dt_softplus and z is None and chunk_size == 256\n"
        "    return efla_kernels.mamba2(x, dt, (-A).log(), B, C, D, dt_bias, backend='torch')[0]\n"
    )
    (folder / "selective_state_update.py").write_text(
        "import efla_kernels\n"
        "def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):\n"
        "    assert dt.shape == x.shape and A.shape == (*x.shape[1:], B.shape[2]) and dt_softplus and z is None\n"
        "    states = state.transpose(2, 3).contiguous()\n"
        "    heads = (dt[..., 0], (-A[:, 0, 0]).log(), B, C, D[:, 0], dt_bias[:, 0])\n"
        "    return efla_kernels.mamba2_step(x, *heads, states, backend='torch')\n"
    )
    yield tmp_path
    for name in [n for n in sys.modules if n.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]


def test_mamba_ssm_is_read_from_a_folder(mamba_ssm: Path) -> None:
    tensors = small("mamba2").case().inputs(0, "cpu")
    with pytest.raises(calls.Unserved, match="mamba_ssm=FOLDER"):
        calls.make_call("mamba2", "mamba_ssm", tensors)
    with pytest.raises(UserError, match=r"expected a folder with mamba_ssm/ops/triton"):
        mamba_calls.use_mamba_ssm(str(mamba_ssm / "mamba_ssm"))
    mamba_calls.use_mamba_ssm(str(mamba_ssm))
    call = calls.make_call("mamba2", "mamba_ssm", tensors)
    got = run.outputs(call, tensors, calls.names("mamba2"))
    assert max(relative_errors(got, small("mamba2").case().truth(tensors)).values()) < 1e-5
    inputs = decoding.decode_inputs("mamba2", 2, 2, 16, torch.float32, "cpu")
    expected = decoding.truth("mamba2", inputs)
    assert (decoding.make_step("mamba2", "mamba_ssm", inputs)() - expected).norm() <= 1e-5 * expected.norm()


def test_processes_divide_what_mamba_ssm_is_tuned_over(mamba_ssm: Path) -> None:
    parts = []
    for part in range(4):
        mamba_calls.use_mamba_ssm(str(mamba_ssm), part, 4)
        parts += sys.modules["mamba_ssm.ops.triton.ssd_combined"].kernel.configs
    assert sorted(parts) == list(range(10))


def test_decoding_inputs_fit_the_op() -> None:
    for rule in ("deltanet", "gated_efla", "mamba2"):
        inputs = decoding.decode_inputs(rule, 2, 2, 16, torch.float32, "cpu")
        expected = decoding.truth(rule, inputs)
        got = decoding.make_step(rule, "torch", inputs)()
        assert (got - expected).norm() <= 1e-5 * expected.norm()


def tiny_settings() -> BenchSettings:
    return BenchSettings(
        ops=["efla", "gated_efla"], shapes=["1x20", "2x12"], heads=[2], width=16, dtype="fp32", decode_batches=[2],
        seeds=2,
    )  # fmt: skip


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole course of a run with PyTorch in the place of kernels, and no clock."""
    monkeypatch.setattr(run, "DEVICE", "cpu")
    monkeypatch.setattr(calls, "_fla_kernel", naive)
    own, step = calls._own, decoding.make_step
    monkeypatch.setattr(calls, "_own", lambda op, backend, x: own(op, "torch", x))
    monkeypatch.setattr(decoding, "make_step", lambda r, impl, x: step(r, "torch" if impl == "ours" else impl, x))
    figures = {"device_us": 2.0, "wall_us": 3.0, "peak_mib": 1.0}
    monkeypatch.setattr(run, "figures", lambda function, repeats: (function(), figures)[1])
    monkeypatch.setattr(run, "layer_figures", lambda calls, repeats: ([call() for call in calls], figures)[1])


@pytest.mark.usefixtures("on_cpu")
def test_the_course_of_a_run() -> None:
    settings = tiny_settings()
    rows = [row for op in settings.ops for row in run.measure_op(settings, op, 2)]
    # two shapes of ours and fla and one of torch in two directions, two of ours_recompute in one; two ops
    assert len(rows) == 2 * (5 * 2 + 2) and not any("skipped" in row for row in rows)
    assert all(row["rel_err"] < 1e-5 for row in rows)
    assert {len(row["rel_errs"]) for row in rows if row["direction"] == "fwd"} == {1}
    assert set(rows[1]["rel_errs"]) == {"o", "dq", "dk", "dv", "dbeta_logit"}
    decoded = list(run.measure_decoding(settings, "efla", 2))
    assert [("skipped" in row, row["impl"]) for row in decoded] == [(False, "ours"), (True, "fla"), (False, "torch")]
    assert [row["layers"] for row in decoded if "layers" in row] == [24, 24]
    for op in settings.ops:
        run.warm(settings, op, "ours", 2)


@pytest.mark.parametrize("op", ["gated_efla", "mamba2"])
def test_layers_that_decode_share_no_state(op: str) -> None:
    """Each step of a measurement moves its own layer on and no other; all give the same output."""
    inputs = decoding.decode_inputs(op, 2, 2, 16, torch.float32, "cpu")
    layers = decoding.layers(inputs, 3)
    outputs = [decoding.make_step(op, "torch", layer)() for layer in layers[:2]]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(layers[0]["state"], layers[1]["state"])
    assert torch.equal(layers[2]["state"], inputs["state"]) and not torch.equal(layers[0]["state"], inputs["state"])


def test_a_time_shared_by_calls() -> None:
    assert Timing.of([240.0, 480.0, 480.0, 720.0]).per_call(24) == Timing(20.0, 12.5, 27.5)


@pytest.mark.usefixtures("on_cpu")
def test_the_course_of_a_run_of_mamba2(mamba_ssm: Path) -> None:
    settings = tiny_settings()
    settings.ops, settings.impls, settings.mamba_ssm = ["mamba2", "efla"], ["ours", "fla", "mamba_ssm"], str(mamba_ssm)
    mamba_calls.use_mamba_ssm(settings.mamba_ssm)
    rows = list(run.measure_op(settings, "mamba2", 2))
    assert len(rows) == 2 * 3 * 2 and not any("skipped" in row for row in rows)
    assert {(row["heads"], row["key_width"], row["value_width"]) for row in rows} == {(8, 16, 8)}
    assert set(rows[1]["rel_errs"]) == {"o", *("d" + name for name in mamba_calls.NAMES)}
    assert {row["impl"] for row in run.measure_op(settings, "efla", 2)} == {"ours", "fla"}
    decoded = list(run.measure_decoding(settings, "mamba2", 2))
    assert [("skipped" in row, row["impl"]) for row in decoded] == [
        (False, "ours"),
        (True, "fla"),
        (False, "mamba_ssm"),
    ]


@pytest.mark.usefixtures("on_cpu")
def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = calls._own
    monkeypatch.setattr(calls, "_own", lambda op, backend, x: own(op, backend, x) * (1 if backend == "torch" else 1.01))
    with pytest.raises(AssertionError, match="wrong before it is timed"):
        list(run.measure_op(tiny_settings(), "efla", 2))


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_that_refuses_is_said_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(op: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError("not on this GPU")

        return refuse

    monkeypatch.setattr(calls, "_fla_kernel", kernel)
    rows = list(run.measure_op(tiny_settings(), "efla", 2))
    assert {row["skipped"] for row in rows if row["impl"] == "fla"} == {"not on this GPU"}
    assert all("device_us" in row for row in rows if row["impl"] == "ours")


def result() -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    figures = {"wall_us": 500.0, "rel_err": 4e-3, "peak_mib": 100.0}
    for heads in (8, 16):
        for batch, tokens in ((8, 2048), (1, 16384)):
            for op, impl, us in (("efla", "ours", 100.0), ("deltanet", "fla", 250.0), ("gated_efla", "ours", 110.0)):
                shape = run.Shape(op, batch, tokens, heads, 128, "bf16")
                rows.append(shape.row(impl, "fwd_bwd") | figures | {"device_us": us})
    rows.append(run.Shape("gated_deltanet", 8, 2048, 8, 128, "bf16").row("fla", "fwd_bwd") | {"skipped": "refuses"})
    names = ("gpu", "driver", "torch", "triton", "flash-linear-attention", "commit")
    return {"environment": dict.fromkeys(names, "x"), "rows": rows}


def test_table_ratios_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ops.json"
    file.write_text(json.dumps(result()))
    assert bench.main.run([f"table={file}"]) == 0
    said = capsys.readouterr().out
    assert "| EFLA, ours | 100 (500) | 100 (500) | 100 (500) | 100 (500) | 4.0e-03 | 100 |" in said
    assert "EFLA fwd_bwd against fla's DeltaNet, device time: 2.50x (geometric mean of 4)" in said
    assert "Gated EFLA over EFLA, fwd_bwd, ours: 1.100" in said
    assert "Gated DeltaNet, fla, fwd_bwd: refuses" in said
    assert file.with_suffix(".png").stat().st_size > 5000
    assert set(report.ratios(result(), "efla", "fwd_bwd")) == {
        "H=8 8x2048", "H=8 1x16384", "H=16 8x2048", "H=16 1x16384",
    }  # fmt: skip


def test_rows_carry_the_columns_that_readers_rely_on() -> None:
    row = small("efla").row("ours", "fwd")
    expected = "op impl batch tokens heads key_width value_width dtype direction"
    assert list(row) == expected.split()


def test_the_pytorch_form_takes_the_first_shape_only() -> None:
    settings = BenchSettings()
    assert len(run.shapes(settings, "efla", "ours", 8)) == 4
    assert [s.batch for s in run.shapes(settings, "efla", "torch", 8)] == [8]


def test_the_widest_heads_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from efla_kernels.delta_rule import triton_op as ops

    assert ops.WIDEST == WIDEST


REFUSED = (
    "decode_layers=0", "shapes=[8by2048]", "shapes=[]", "impls=[cuda]", "impls=[mamba_ssm]", "ops=[mamba]", "seeds=0",
    "heads=[8,0]", "decode_batches=[]", "workers=-1", "impls=[ours_recompute] directions=[fwd,decode]",
    "impls=[mamba_ssm] mamba_ssm=. ops=[efla]", "width=1", "width=512",
)  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED)
def test_values_that_mean_nothing_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main.run(arguments.split()) in (1, 2)
    assert "error:" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a GPU")
def test_without_an_accelerator_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main.run([]) == 0
    assert "no accelerator" in capsys.readouterr().out


def test_a_missing_result_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main.run([f"table={tmp_path / 'none.json'}"]) == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["no JSON", "[]", "{}", '{"rows": [{"layer": "loss"}]}'])
def test_another_file_is_no_result(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text(content)
    assert bench.main.run([f"table={tmp_path / 'other.json'}"]) == 1
    assert "other.json: expected a result file of this command" in capsys.readouterr().err


def test_rows_are_in_the_file_as_soon_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed cannot clean up: the file is whole after every row."""

    def two_rows(*_: Any) -> Iterator[dict[str, Any]]:
        for count, direction in enumerate(("fwd", "fwd_bwd"), 1):
            yield small("efla").row("ours", direction) | {"skipped": f"row {count}"}
            assert len(json.loads((tmp_path / "ops.json").read_text())["rows"]) == count
        raise RuntimeError("killed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "describe_environment", dict)
    monkeypatch.setattr(run, "measure_op", two_rows)
    with pytest.raises(RuntimeError, match="killed"):
        bench.main.run(["ops=[efla]", "heads=[2]", "workers=0", f"out={tmp_path}/ops.json"], program="bench")
    assert len(json.loads((tmp_path / "ops.json").read_text())["rows"]) == 2
