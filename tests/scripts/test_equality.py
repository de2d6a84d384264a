"""Loss equality on a CPU: launches of variants, differences by hand, what fails the command."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from efla_lm.errors import UserError
from efla_lm.settings import TrainSettings, compose
from scripts.loss_equality import __main__ as loss_equality
from scripts.loss_equality import run as equality
from scripts.loss_equality.run import VARIANTS, EqualitySettings
from scripts.study import launcher
from tests.training.corpus import write_corpus
from tests.training.launch import TINY

SMALL = [part for part in TINY if part.startswith("model.")] + ["schedule.peak=0.01", "schedule.warmup_updates=2"]


def run(corpus: Path, out: Path, *overrides: str) -> int:
    quoted = ",".join(f"'{part}'" for part in SMALL)
    arguments = [f"data_dir={corpus}", f"out={out}", "steps=6", "context=16", "batch_tokens=64", f"train=[{quoted}]"]
    return loss_equality.main.run([*arguments, *overrides], program="loss_equality")


@pytest.mark.timeout(200)
def test_variants_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, out = write_corpus(tmp_path / "tokens"), tmp_path / "equality.json"
    variants = "variants=[half micro-batches,triton,'2 processes, ddp']"
    assert run(corpus, out, "precision=fp32", variants, "at_once=2") == 1  # triton needs a GPU
    result = json.loads(out.read_text())
    assert list(result["losses"]) == ["reference", "half micro-batches", "2 processes, ddp"]
    assert "triton" in result["failed"]["triton"]
    assert all(len(curve) == 6 and curve[-1] < curve[0] for curve in result["losses"].values())
    assert result["differences"]["reference"] == {"largest": 0.0, "last": 0.0}
    assert all(result["differences"][name]["largest"] < 1e-5 for name in ("half micro-batches", "2 processes, ddp"))
    assert out.with_suffix(".png").stat().st_size > 0
    assert "differs by" in capsys.readouterr().out
    before = out.read_text()
    monkeypatch.setattr(equality, "launch", lambda *_: pytest.fail("all is there: nothing is run again"))
    assert run(corpus, out, "precision=fp32", "variants=[half micro-batches]") == 0
    assert json.loads(out.read_text())["losses"] == json.loads(before)["losses"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("at_once", [1, 2])
def test_nothing_goes_on_after_a_reference_that_failed(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither what runs beside it nor what waits for its turn, each of which would take minutes."""
    started: list[subprocess.Popen[bytes]] = []

    def command(settings: EqualitySettings, name: str, runs: Path) -> list[str]:
        code = "raise ValueError('out of luck')" if name == "reference" else "import time; time.sleep(300)"
        return [sys.executable, "-c", code]

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            super().__init__(command, **options)
            if options.get("start_new_session"):
                started.append(self)

    monkeypatch.setattr(equality, "command", command)
    monkeypatch.setattr(launcher.subprocess, "Popen", Noted)
    assert run(tmp_path, tmp_path / "equality.json", f"at_once={at_once}") == 1
    assert "ValueError: out of luck" in capsys.readouterr().out
    assert 1 <= len(started) <= at_once + 1 and all(process.wait(5) for process in started)


def test_a_loaded_machine_has_as_long_as_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without limit_s no launch is cut off; with it, what is left over is named and not started."""
    limits: list[float | None] = []

    class Slow:
        def run(self, command: list[str], limit_s: float | None) -> launcher.Outcome:
            limits.append(limit_s)
            return launcher.Outcome(None, "")

    assert EqualitySettings().limit_s is None
    assert (
        equality.launch(EqualitySettings(), "compiled", tmp_path, math.inf, Slow()) == "not done when limit_s was over"
    )
    assert equality.launch(EqualitySettings(), "compiled", tmp_path, 0.0, Slow()) == "not run: limit_s was over"
    assert limits == [None]


def test_differences_by_hand() -> None:
    losses = {"reference": [4.0, 2.0, 1.0], "other": [4.0, 2.2, 0.95]}
    assert equality.differences(losses, "reference")["other"] == {
        "largest": pytest.approx(0.1),
        "last": pytest.approx(0.05),
    }
    assert equality.differences(losses, "other")["other"] == {"largest": 0.0, "last": 0.0}


def test_choice_of_variants() -> None:
    settings = EqualitySettings()
    on_cpu, one_gpu, two_gpus = (equality.chosen(settings, gpus) for gpus in (0, 1, 2))
    assert on_cpu == [name for name, (_, gpu, _) in VARIANTS.items() if not gpu]
    assert one_gpu == [name for name, (processes, _, _) in VARIANTS.items() if processes == 1]
    assert two_gpus == list(VARIANTS)
    assert equality.chosen(EqualitySettings(variants=["compiled"]), 0) == ["reference", "compiled"]
    assert equality.chosen(EqualitySettings(variants=["reference", "triton"], reference="triton"), 1)[0] == "triton"
    with pytest.raises(UserError, match="variants="):
        EqualitySettings(variants=["jit"]).validate()


@pytest.mark.parametrize("name", VARIANTS)
def test_launches_are_train_pys(name: str, tmp_path: Path) -> None:
    """Every variant composes, with the batches of the others."""
    command = equality.command(EqualitySettings(), name, tmp_path)
    composed = compose("train", command[command.index(str(equality.ROOT / "train.py")) + 1 :], TrainSettings)
    assert (composed.train.batch_tokens, composed.data.context, composed.seed) == (2048, 64, 42)
    assert composed.train.micro_tokens == (1024 if "half micro-batches" in name else 2048)
    assert ("torch.distributed.run" in command) == (VARIANTS[name][0] > 1)
