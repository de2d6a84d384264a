"""A run outlives its output: readers that go away, full disks, trackers that fail, a terminal that closes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from efla_lm.run import export as export_module
from efla_lm.run import metrics as metrics_module
from efla_lm.run.checkpoint import checkpoints_in
from efla_lm.run.metrics import MetricsWriter
from efla_lm.run.output import lasting_output
from efla_lm.run.verify import damage_in
from efla_lm.training import trainer
from scripts import export
from tests.training.launch import ROOT, arguments, metrics, run_here

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("stream", ["stdout", "stderr", "both"])
def test_a_reader_that_goes_away_does_not_end_a_run(corpus: Path, tmp_path: Path, stream: str) -> None:
    """As `train.py 2>&1 | head -0` does."""
    reader, writer = os.pipe()
    os.close(reader)
    quiet: dict[str, int] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet |= {name: writer for name in quiet if stream in (name, "both")}
    command = [sys.executable, "train.py", *arguments(corpus, tmp_path, "name=run", "train.steps=4")]
    code = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=200, **quiet
    ).returncode
    os.close(writer)
    assert code == 0
    assert len(metrics(tmp_path, "run")) == 4 and (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_a_full_disk_behind_stdout_is_ignored() -> None:
    with open("/dev/full", "w") as full, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        with lasting_output():
            print("x" * 100_000, flush=True)
            print("and more", flush=True)


def failing(at: int, act: Callable[[], object]) -> Callable[..., object]:
    """The training step, with `act` called when number `at` begins."""
    plain, count = trainer.train_step, iter(range(10**9))

    def step(*args: object, **kwargs: object) -> object:
        if next(count) == at:
            act()
        return plain(*args, **kwargs)  # type: ignore[arg-type]

    return step


def test_a_failed_write_of_metrics_saves_first(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    plain = MetricsWriter.write

    def write(self: MetricsWriter, row: dict[str, int]) -> None:
        if row["step"] >= 5:
            raise OSError(errno.ENOSPC, "No space left on device", str(self._path))
        plain(self, row)

    monkeypatch.setattr(MetricsWriter, "write", write)
    assert run_here(corpus, tmp_path, "name=run", "train.steps=20") == 1
    said = capsys.readouterr()
    assert "stopped on a failed write" in said.out and "no space left" in said.err and "metrics.jsonl" in said.err
    (saved,) = checkpoints_in(tmp_path / "run")
    assert saved.name == "step-6" and damage_in(saved) is None
    monkeypatch.undo()
    assert run_here(corpus, tmp_path, "name=run", "train.steps=20") == 0
    assert metrics(tmp_path, "run", "step")[-1] == 20


def test_a_tracker_that_fails_is_left_out(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(self: object, row: object) -> None:
        raise ConnectionError("the tracker is away")

    monkeypatch.setattr(metrics_module._Tensorboard, "write", fail)
    assert run_here(corpus, tmp_path, "name=run", "train.steps=4", "logger=tensorboard") == 0
    assert capsys.readouterr().err.count("warning: tensorboard failed") == 1
    assert len(metrics(tmp_path, "run")) == 4


def test_a_closed_terminal_saves(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(trainer, "train_step", failing(2, lambda: os.kill(os.getpid(), signal.SIGHUP)))
    before = signal.getsignal(signal.SIGHUP)
    assert run_here(corpus, tmp_path, "name=run", "train.steps=20") == 0
    assert "stopped on SIGHUP" in capsys.readouterr().out and signal.getsignal(signal.SIGHUP) == before
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-4"]


def test_nohup_is_respected(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(trainer, "train_step", failing(2, lambda: os.kill(os.getpid(), signal.SIGHUP)))
        assert run_here(corpus, tmp_path, "name=run", "train.steps=6") == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == ["step-6"]


@pytest.mark.parametrize("where", ["step", "save"])
def test_a_second_interrupt_ends_with_130(
    corpus: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    if where == "step":
        monkeypatch.setattr(trainer, "train_step", failing(2, twice))
    else:
        from torch.distributed.checkpoint import FileSystemWriter

        plain = FileSystemWriter.write_data
        monkeypatch.setattr(FileSystemWriter, "write_data", lambda *args: (twice(), plain(*args)))
    assert run_here(corpus, tmp_path, "name=run", "train.steps=6", "train.save_every=4") == 130
    assert capsys.readouterr().err.strip().splitlines() == ["interrupted"]


def test_checkpoints_before_a_series_of_skipped_updates_stay(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    plain, count = trainer.train_step, iter(range(10**9))

    def step(*args: object, **kwargs: object) -> object:
        result = plain(*args, **kwargs)  # type: ignore[arg-type]
        if next(count) >= 4:
            result[1:3] = torch.tensor([torch.inf, 1.0])  # a gradient that is not finite: skipped
        return result

    monkeypatch.setattr(trainer, "train_step", step)
    settings = ("train.save_every=1", "train.keep_checkpoints=2", "train.max_skipped_steps=5")
    assert run_here(corpus, tmp_path, "name=run", "train.steps=20", *settings) == 1
    assert "not finite" in capsys.readouterr().err
    names = [path.name for path in checkpoints_in(tmp_path / "run")]
    assert names[:2] == ["step-3", "step-4"] and names[2:] == [f"step-{n}" for n in range(5, 5 + len(names) - 2)]


@pytest.mark.parametrize("kind", ["safetensors", "system"])
def test_an_export_on_a_full_disk_is_one_error(
    corpus: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    from safetensors import SafetensorError

    assert run_here(corpus, tmp_path, "name=run", "train.steps=2", "train.stop_at=1") == 0

    def full(*args: object, **kwargs: object) -> None:
        if kind == "system":
            raise OSError(errno.ENOSPC, "No space left on device")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export_module.EflaForCausalLM, "save_pretrained", full)
    capsys.readouterr()
    assert export.main.run([f"checkpoint={tmp_path / 'run'}", f"out={tmp_path / 'out'}"]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and f"{tmp_path / 'out'}: not written" in error[0]
    assert not list(tmp_path.glob("out*"))


def test_what_a_killed_export_left_is_cleaned_up(corpus: Path, tmp_path: Path) -> None:
    assert run_here(corpus, tmp_path, "name=run", "train.steps=2", "train.stop_at=1") == 0
    gone, run = 2**22 + 1, tmp_path / "run"  # above the highest process id
    for name in (f"export.{gone}.tmp", f"export.{gone}.old", f"export.{os.getpid()}.old", "export.notes"):
        (run / name).mkdir()
    assert export.main.run([f"checkpoint={run}"]) == 0
    assert sorted(path.name for path in run.glob("export*")) == ["export", "export.notes"]
    (run / "export").rename(run / f"export.{gone}.old")  # killed between two renames
    with pytest.raises(ZeroDivisionError), export_module.whole_folder(run / "export"):
        raise ZeroDivisionError
    assert (run / "export" / "config.json").is_file()


def test_scores_are_printed_where_the_result_cannot_be_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    import eval as eval_script

    assert run_here(corpus, tmp_path, "name=run", "train.steps=2", "train.stop_at=1") == 0

    def full(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    out = tmp_path / "out"
    assert eval_script.main.run([f"checkpoint={tmp_path / 'run'}", "tasks=heldout", f"out={out}"]) == 1
    said = capsys.readouterr()
    assert "bits_per_byte" in said.out
    assert f"error: {out}" in said.err and "cannot be written" in said.err
    assert not list(out.iterdir())
