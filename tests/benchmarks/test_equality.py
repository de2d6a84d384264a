"""Loss equality on a CPU: launches of variants, differences by hand, what fails the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from efla_lm.errors import UserError
from efla_lm.settings import TrainSettings, compose
from scripts.loss_equality import __main__ as loss_equality
from scripts.loss_equality import run as equality
from scripts.loss_equality.run import VARIANTS, EqualitySettings
from tests.training.corpus import write_corpus
from tests.training.launch import TINY

SMALL = [part for part in TINY if part.startswith("model.")] + ["schedule.peak=0.01", "schedule.warmup_updates=2"]


def run(corpus: Path, out: Path, *overrides: str) -> int:
    quoted = ",".join(f"'{part}'" for part in SMALL)
    arguments = [f"data_dir={corpus}", f"out={out}", "steps=6", "context=16", "batch_tokens=64", f"train=[{quoted}]"]
    return loss_equality.main.run([*arguments, *overrides], program="loss_equality")


@pytest.mark.timeout(200)
def test_variants_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("at_once", [1, 2])
def test_nothing_goes_on_after_a_reference_that_failed(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither what runs beside it nor what waits for its turn, each of which would take minutes."""
    started: list[subprocess.Popen[str]] = []

    def command(settings: EqualitySettings, name: str, runs: Path) -> list[str]:
        code = "raise ValueError('out of luck')" if name == "reference" else "import time; time.sleep(300)"
        return [sys.executable, "-c", code]

    def start(self: equality.Processes, arguments: list[str]) -> subprocess.Popen[str]:
        started.append(plain(self, arguments))
        return started[-1]

    plain = equality.Processes.start
    monkeypatch.setattr(equality, "command", command)
    monkeypatch.setattr(equality.Processes, "start", start)
    assert run(tmp_path, tmp_path / "equality.json", f"at_once={at_once}") == 1
    assert "ValueError: out of luck" in capsys.readouterr().out
    assert 1 <= len(started) <= at_once + 1 and all(process.wait(5) for process in started)


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
