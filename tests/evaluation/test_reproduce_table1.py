"""The one command from training to the table: it can be stopped and repeated, and says what it costs."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from efla_lm.run.metrics import read_rows
from scripts import reproduce_table1
from scripts.study.launcher import ROOT
from tests.evaluation.material import write_task_files
from tests.training.corpus import write_corpus
from tests.training.launch import TINY

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("tasks"), documents=2)


def arguments(corpus: Path, tasks: Path, tmp_path: Path, *more: str, models: str = "efla") -> list[str]:
    train = [*TINY, "model.vocab_size=61", "train.steps=2"]
    evaluate = ["limit=2", "device=cpu", "bootstrap=10"]
    return [
        "size=tiny", "gpus=1", f"models=[{models}]", f"runs_dir={tmp_path}/runs", f"out={tmp_path}/table",
        f"local_dir={tasks}", f"data_dir={corpus}", f"train=[{','.join(map(repr, train))}]",
        f"eval=[{','.join(map(repr, evaluate))}]", *more,
    ]  # fmt: skip


@pytest.mark.timeout(180)
def test_train_evaluate_and_repeat_what_is_missing_only(
    corpus: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = arguments(corpus, tasks, tmp_path)
    assert reproduce_table1.main.run(command) == 0
    run = tmp_path / "runs" / "table1-tiny-efla-seed42"
    assert [row["step"] for row in read_rows(run / "metrics.jsonl") if "loss" in row] == [1, 2]
    with (tmp_path / "table" / "table1.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {(row["size"], row["family"]) for row in rows} == {("tiny", "efla")}
    assert all(row["value"] for row in rows)
    shown = capfd.readouterr().out
    assert "to be trained" in shown and "GPU-hours" in shown

    def fail(command: list[str]) -> tuple[int, bool]:
        raise AssertionError(f"nothing is left to do, but {command} was run")

    monkeypatch.setattr(reproduce_table1, "run_until_stopped", fail)
    assert reproduce_table1.main.run(command) == 0
    assert "evaluated" in capfd.readouterr().out
    (result,) = (run / "results").glob("paper-*.json")
    content = json.loads(result.read_text())
    assert content["evaluation"]["model"]["size"] == "tiny"
    assert content["evaluation"]["model"]["seed"] == 42

    # a result of fewer documents, or with a task missing, is none
    content["missing"] = {"piqa": "no file"}
    result.write_text(json.dumps(content))
    seen: list[list[str]] = []
    monkeypatch.setattr(reproduce_table1, "run_until_stopped", lambda command: (seen.append(command), (1, False))[1])
    assert reproduce_table1.main.run(command) == 1
    assert [command[1] for command in seen] == ["eval.py"]


def test_a_failing_model_does_not_keep_the_next_from_running(
    corpus: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    seen: list[str] = []

    def fail(command: list[str]) -> tuple[int, bool]:
        seen.append(next(part for part in command if part.startswith("model=")))
        return 3, False

    monkeypatch.setattr(reproduce_table1, "run_until_stopped", fail)
    assert reproduce_table1.main.run(arguments(corpus, tasks, tmp_path, models="efla,deltanet")) == 1
    assert seen == ["model=efla", "model=deltanet"]
    assert "training of table1-tiny-efla-seed42 ended with exit code 3" in capfd.readouterr().err


def test_token_files_that_are_missing_are_one_line(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    def fail(command: list[str]) -> tuple[int, bool]:
        raise AssertionError(f"nothing can be trained, but {command} was run")

    monkeypatch.setattr(reproduce_table1, "run_until_stopped", fail)
    assert reproduce_table1.main.run(arguments(tmp_path / "none", tasks, tmp_path, models="efla,deltanet")) == 1
    assert capfd.readouterr().err.count("error: no token files in") == 1


def test_a_stop_ends_it(
    corpus: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(reproduce_table1, "run_until_stopped", lambda command: (seen.append(command), (0, True))[1])
    assert reproduce_table1.main.run(arguments(corpus, tasks, tmp_path, models="efla,deltanet")) == 1
    assert len(seen) == 1
    assert "the same command continues" in capfd.readouterr().err


def test_a_dry_run_names_every_command(tmp_path: Path, capfd: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce_table1, "run_until_stopped", lambda command: pytest.fail("a dry run runs nothing"))
    options = ["size=340m", "gpus=8", "seeds=[1,2]", f"runs_dir={tmp_path}", "dry_run=true", "price=2"]
    assert reproduce_table1.main.run(options) == 0
    shown = capfd.readouterr().out
    assert shown.count("--nproc-per-node=8 train.py experiment=table1_340m") == 10, "the paper's five models, two seeds"
    assert shown.count("--nproc-per-node=8 eval.py checkpoint=") == 10
    assert "per GPU-hour" in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("bad", "code"), [("gpus=3", 1), ("models=[]", 1), ("seeds=[1,1]", 1), ("models=[elfa]", 1), ("gpu=abacus", 2)]
)
def test_what_cannot_be_meant_is_one_clear_line(bad: str, code: int, tmp_path: Path, capfd: Captured) -> None:
    assert reproduce_table1.main.run(["size=340m", f"runs_dir={tmp_path}", "dry_run=true", bad]) == code
    assert len(capfd.readouterr().err.strip().splitlines()) == 1


def test_a_request_to_stop_is_handed_on_and_the_child_waited_for(tmp_path: Path) -> None:
    child = (
        "import pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"
        f"    pathlib.Path({str(tmp_path / 'saved')!r}).write_text('yes')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"pathlib.Path({str(tmp_path / 'up')!r}).write_text('yes')\n"
        "time.sleep(60)\n"
    )
    parent = (
        "import os, pathlib, signal, sys, threading, time\n"
        "from scripts.study.launcher import run_until_stopped\n"
        "def later():\n"
        f"    while not pathlib.Path({str(tmp_path / 'up')!r}).exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "threading.Thread(target=later, daemon=True).start()\n"
        f"print(run_until_stopped([sys.executable, '-c', {child!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", parent], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("(0, True)"), done
    assert (tmp_path / "saved").exists()
