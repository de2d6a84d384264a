"""A run that stops and goes on is the run that never stopped: same batches, same bits."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from efla_data.loader.batches import ValidationLoader
from transformers import Mamba2ForCausalLM

import train
from efla_lm import EflaForCausalLM
from efla_lm.run.checkpoint import read_tensors
from efla_lm.run.metrics import read_rows
from efla_lm.training import trainer
from scripts import convert
from tests.training.corpus import VOCAB, write_corpus
from tests.training.launch import (
    arguments,
    assert_same_weights,
    consumed,
    metrics,
    run_command,
    run_here,
    steady_rows,
    weights,
)

STEPS = 40  # 4 windows each, 63 windows per epoch: two and a half epochs
LENGTH = (f"train.steps={STEPS}", "train.validate_every=10")


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("straight")
    assert run_here(corpus, runs, "name=run", *LENGTH) == 0
    return runs


def all_tensors(runs: Path, name: str, step: int) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of a checkpoint."""
    return read_tensors(runs / name / "checkpoints" / f"step-{step}")


@pytest.mark.parametrize("stops", [(20,), (10, 20), (25,)], ids=["20+20", "10+10+20", "60% of epoch 2"])
def test_stopped_and_continued_is_bit_equal(
    corpus: Path, straight: Path, tmp_path: Path, stops: tuple[int, ...]
) -> None:
    for stop in stops:
        assert run_here(corpus, tmp_path, "name=run", *LENGTH, f"train.stop_at={stop}") == 0
        assert not (tmp_path / "run" / "export").exists()
    assert run_here(corpus, tmp_path, "name=run", *LENGTH) == 0
    assert consumed(tmp_path, "run") == consumed(straight, "run")
    assert steady_rows(tmp_path, "run") == steady_rows(straight, "run")
    ours, theirs = all_tensors(tmp_path, "run", STEPS), all_tensors(straight, "run", STEPS)
    assert any(name.startswith("optim.") and name.endswith("exp_avg_sq") for name in ours)
    assert_same_weights(ours, theirs)
    speeds = metrics(tmp_path, "run", "tokens_per_second")
    unknown = [step for step, speed in enumerate(speeds, start=1) if speed is None]
    assert unknown == [first + n for first in (0, *stops) for n in (1, 2)]  # of each launch


def test_mamba2_trains_resumes_converts_and_generates(corpus: Path, tmp_path: Path) -> None:
    """Bit equal after a stop; the export generates the same tokens with and without a cache, and so does transformers'
    own model of the same weights."""
    options = ("model=mamba2", "train.steps=8")
    assert run_here(corpus, tmp_path, "name=straight", *options) == 0
    assert run_here(corpus, tmp_path, "name=run", *options, "train.stop_at=3") == 0
    assert run_here(corpus, tmp_path, "name=run", *options) == 0
    assert_same_weights(all_tensors(tmp_path, "run", 8), all_tensors(tmp_path, "straight", 8))
    losses = metrics(tmp_path, "run")
    assert len(losses) == 8 and losses[-1] < losses[0]
    convert.to_others(str(tmp_path / "run"), "transformers", tmp_path / "theirs")
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    chosen = []
    # by class: once fla is imported, AutoModel takes fla's for everything that is called mamba2
    for kind, folder, cached in ((EflaForCausalLM, "run/export", True), (EflaForCausalLM, "run/export", False),
                                 (Mamba2ForCausalLM, "theirs", False)):  # fmt: skip
        model = kind.from_pretrained(tmp_path / folder)
        chosen.append(model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=cached, eos_token_id=None))
    assert torch.equal(chosen[0], chosen[1]) and torch.equal(chosen[0], chosen[2])


def test_batches_cover_each_epoch_once(straight: Path) -> None:
    ids = [window for step in consumed(straight, "run") for window in step]
    assert sorted(ids[:63]) == list(range(63))
    assert sorted(ids[63:126]) == list(range(63))
    assert ids[:63] != ids[63:126]


def test_learning_rate_and_rows(straight: Path) -> None:
    """Row C3: 3e-5 at update 0, the peak at update 10, 3e-5 at the last; and the contract of a row."""
    rates = metrics(straight, "run", "lr")
    assert len(rates) == STEPS
    assert (rates[0], rates[10], rates[-1]) == (3e-5, 0.01, 3e-5)
    assert max(rates) == rates[10]
    all_rows = read_rows(straight / "run" / "metrics.jsonl")
    rows = [row for row in all_rows if "loss" in row]
    names = ["step", "tokens", "loss", "lr", "grad_norm", "clip_scale"]
    names += ["tokens_per_second", "mfu", "seconds", "peak_memory_gib", "skipped_steps"]
    assert all(list(row) == names for row in rows)
    assert [row["tokens"] for row in rows] == [64 * row["step"] for row in rows]
    assert [row["tokens_per_second"] for row in rows[:2]] == [None, None]  # the steps of the start-up do not count
    assert all(row["tokens_per_second"] > 0 for row in rows[2:])
    assert all(row["peak_memory_gib"] > 0 for row in rows)
    assert all(row["clip_scale"] == min(1.0, 1.0 / row["grad_norm"]) for row in rows)  # train.clip_norm=1
    assert min(row["clip_scale"] for row in rows) < 1
    validations = [row for row in all_rows if "val_loss" in row]
    assert [row["step"] for row in validations] == [10, 20, 30, 40]
    assert all(list(row) == ["step", "val_loss"] for row in validations)
    assert validations[-1]["val_loss"] < rows[0]["loss"] - 0.5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_signal_saves_and_leaves(
    corpus: Path, straight: Path, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    plain = trainer.train_step

    def interrupted(*args, **kwargs):
        if interrupted.calls == 16:
            os.kill(os.getpid(), number)
        interrupted.calls += 1
        return plain(*args, **kwargs)

    interrupted.calls = 0
    monkeypatch.setattr(trainer, "train_step", interrupted)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert run_here(corpus, tmp_path, "name=run", *LENGTH) == 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    said = capsys.readouterr().out
    assert f"stopped on {number.name}" in said and "name=run" in said
    # the signal came while update 17 ran; `stop` is read before it, so one more follows
    steps = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert steps == ["step-18"]
    monkeypatch.setattr(trainer, "train_step", plain)
    assert run_here(corpus, tmp_path, "name=run", *LENGTH) == 0
    assert_same_weights(weights(tmp_path, "run", STEPS), weights(straight, "run", STEPS))
    assert consumed(tmp_path, "run") == consumed(straight, "run")


def at_batch(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> list[int]:
    """Act when the validation batch `number` of the whole run is read; returns the indices of those read."""
    plain, count, read = ValidationLoader.batch, itertools.count(), []

    def batch(self: ValidationLoader, index: int):  # type: ignore[no-untyped-def]
        if next(count) == number:
            act()
        read.append(index)
        return plain(self, index)

    monkeypatch.setattr(ValidationLoader, "batch", batch)
    return read


@pytest.mark.parametrize("validation", [2, 4], ids=["of update 20", "the last"])
def test_signal_in_a_validation_saves_and_leaves_it(
    corpus: Path, straight: Path, tmp_path: Path, validation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        read = at_batch(patch, -1, lambda: None)
        assert run_here(corpus, tmp_path, "name=whole", *LENGTH, "train.stop_at=10") == 0
    batches = len(read)
    assert batches > 4
    with pytest.MonkeyPatch.context() as patch:
        second = (validation - 1) * batches + 1
        read = at_batch(patch, second, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run_here(corpus, tmp_path, "name=run", *LENGTH) == 0
    assert len(read) == second + 1, "no batch is read after the one that ran"
    step, folder = 10 * validation, tmp_path / "run"
    assert f"stopped on SIGTERM after step {step} of {STEPS}: {folder}/checkpoints/step-{step} is saved" in (
        capsys.readouterr().out
    )
    assert os.listdir(folder / "checkpoints") == [f"step-{step}"] and not (folder / "export").exists()
    assert len(metrics(tmp_path, "run", "val_loss")) == validation - 1

    assert run_here(corpus, tmp_path, "name=run", *LENGTH) == 0  # makes up for it, and is the run that never stopped
    assert steady_rows(tmp_path, "run") == steady_rows(straight, "run")
    assert_same_weights(weights(tmp_path, "run", STEPS), weights(straight, "run", STEPS))
    assert (folder / "export").is_dir()


def test_signal_in_the_last_update_leaves_the_validation_to_the_next_launch(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trainer.train_step

    def interrupted(*args, **kwargs):
        return plain(*args, **{**kwargs, "stop": next(calls) == 11})

    calls = itertools.count()
    monkeypatch.setattr(trainer, "train_step", interrupted)
    read = at_batch(monkeypatch, -1, lambda: None)
    assert run_here(corpus, tmp_path, "name=run", "train.steps=12") == 0
    assert read == [] and os.listdir(tmp_path / "run" / "checkpoints") == ["step-12"]
    assert run_here(corpus, tmp_path, "name=run", "train.steps=12") == 0
    assert len(metrics(tmp_path, "run", "val_loss")) == 1 and (tmp_path / "run" / "export").is_dir()
    done = len(read)
    assert run_here(corpus, tmp_path, "name=run", "train.steps=12") == 0
    assert len(read) == done, "a validation that was made up for is not owed again"


def test_a_checkpoint_is_there_before_its_validation(corpus: Path, straight: Path, tmp_path: Path) -> None:
    """Killed while it validates, a run goes on from that update, and validates there first."""

    def killed() -> None:
        raise RuntimeError("killed")

    with pytest.MonkeyPatch.context() as patch:
        at_batch(patch, 1, killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_here(corpus, tmp_path, "name=run", *LENGTH, "train.save_every=10")
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-10"]
    assert run_here(corpus, tmp_path, "name=run", *LENGTH) == 0
    assert steady_rows(tmp_path, "run") == steady_rows(straight, "run")
    # a run of its own that begins at another one's checkpoint owes nothing
    elsewhere = f"resume={tmp_path}/run/checkpoints/step-10"
    assert run_here(corpus, tmp_path, "name=other", *LENGTH, "train.stop_at=11", elsewhere) == 0
    assert metrics(tmp_path, "other", "val_loss") == []


def test_another_launch_saves_before_the_lock_is_had(
    corpus: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that comes while another one leaves goes on from what that one saved."""
    assert run_here(corpus, tmp_path, "name=run", *LENGTH, "train.stop_at=5") == 0
    plain = train.open_run

    def late(*args, **kwargs):
        other = arguments(corpus, tmp_path, "name=run", *LENGTH, "train.stop_at=15")
        run_command([sys.executable, "train.py", *other], expect=0)
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(train, "open_run", late)
        assert run_here(corpus, tmp_path, "name=run", *LENGTH, "train.stop_at=8") == 0
    assert metrics(tmp_path, "run", "step")[-1] == 15  # nothing taken back, nothing to do
    assert run_here(corpus, tmp_path, "name=run", *LENGTH) == 0
    assert steady_rows(tmp_path, "run") == steady_rows(straight, "run")
    assert consumed(tmp_path, "run") == consumed(straight, "run")


def test_a_run_without_checkpoints_takes_the_tokenizer_of_new_data(corpus: Path, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "other")
    path = other / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace('"w9"', '"other"'))
    run = tmp_path / "run"
    assert run_here(corpus, tmp_path, "name=run", "train.steps=2") == 0
    assert run_here(other, tmp_path, "name=run", "train.steps=3") == 0  # the same ids: it goes on, with what it has
    assert (run / "tokenizer" / "tokenizer.json").read_text() != path.read_text()
    shutil.rmtree(run / "checkpoints")
    assert run_here(other, tmp_path, "name=run", "train.steps=2") == 0
    assert (run / "tokenizer" / "tokenizer.json").read_text() == path.read_text()
    assert '"other"' in (run / "export" / "tokenizer.json").read_text()


def test_finished_run_has_nothing_to_do(corpus: Path, tmp_path: Path) -> None:
    assert run_here(corpus, tmp_path, "name=run", "train.steps=3") == 0
    before = steady_rows(tmp_path, "run")
    assert run_here(corpus, tmp_path, "name=run", "train.steps=3") == 0
    assert steady_rows(tmp_path, "run") == before
    assert run_here(corpus, tmp_path, "name=run", "train.steps=5") == 0  # a longer run goes on
    assert metrics(tmp_path, "run", "step")[-1] == 5
