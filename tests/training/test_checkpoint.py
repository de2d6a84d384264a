"""Checkpoints are whole or not there: crashes, full disks, other models, other data."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from efla_lm.errors import UserError
from efla_lm.parallel.distributed import local
from efla_lm.run import checkpoint, save
from efla_lm.run.checkpoint import (
    checkpoints_in,
    find_checkpoint,
    load_model_weights,
    newest_checkpoint,
)
from efla_lm.run.meta import read_meta, write_meta
from efla_lm.run.tensor_index import read_index
from efla_lm.run.verify import damage_in, fault_in
from tests.training.corpus import write_corpus
from tests.training.launch import ROOT, arguments, assert_same_weights, metrics, run_here, weights

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 updates with checkpoints at 2, 4 and 6, with checksums for every 4 KiB. Tests copy it."""
    runs = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "BLOCK", 4096)
        assert run_here(corpus, runs, "name=run", "train.steps=6", "train.save_every=2") == 0
    return runs / "run"


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path


def error_line(capsys: Captured) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_layout(saved: Path) -> None:
    assert [path.name for path in checkpoints_in(saved)] == ["step-2", "step-4", "step-6"]
    newest = newest_checkpoint(saved)
    assert newest == find_checkpoint(saved) == find_checkpoint(saved / "checkpoints" / "step-6")
    assert newest is not None and fault_in(newest) is None
    assert (newest / "config.json").is_file()
    assert (checkpoint.tokenizer_dir(newest) / "tokenizer.json").is_file()
    meta = read_meta(newest)
    assert (meta.step, meta.tokens, meta.skipped_steps) == (6, 6 * 64, 0)
    state = load_model_weights(newest)
    assert state["lm_head.weight"].shape == (61, 32)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())


def test_keeps_the_newest(corpus: Path, tmp_path: Path) -> None:
    settings = ("name=run", "train.steps=5", "train.save_every=1", "train.keep_checkpoints=2")
    assert run_here(corpus, tmp_path, *settings) == 0
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step-4", "step-5"]


def test_damaged_ones_are_not_counted_among_those_kept(runs: Path, corpus: Path, capsys: Captured) -> None:
    os.truncate(runs / "run" / "checkpoints" / "step-6" / "__0_0.distcp", 1000)
    settings = ("name=run", "train.steps=6", "train.stop_at=5", "train.save_every=1", "train.keep_checkpoints=1")
    assert run_here(corpus, runs, *settings) == 0
    newest = newest_checkpoint(runs / "run")
    assert newest is not None and newest.name == "step-5"
    assert sorted(os.listdir(newest.parent)) == ["step-5", "step-6"]


@pytest.mark.parametrize("damage", ["cut", "lost", "no description", "nonsense"])
def test_damaged_newest_is_passed_over(runs: Path, corpus: Path, damage: str, capsys: Captured) -> None:
    newest = runs / "run" / "checkpoints" / "step-6"
    if damage == "cut":
        os.truncate(newest / "__0_0.distcp", 1000)
    elif damage == "lost":
        (newest / ".metadata").unlink()
    elif damage == "no description":
        (newest / "meta.json").unlink()
    else:
        (newest / "meta.json").write_text("{")
    with pytest.raises(UserError, match="damaged checkpoint"):
        find_checkpoint(newest)
    before = weights(runs, "run", 4)
    assert run_here(corpus, runs, "name=run", "train.steps=6") == 0
    out = capsys.readouterr().out
    assert "passing over a damaged checkpoint" in out and "step-6" in out and "step 4 from" in out
    assert fault_in(newest) is None  # written anew
    assert_same_weights(weights(runs, "run", 4), before)


@pytest.mark.parametrize("where", ["weight", "moment", "frame", "tail of zeros", "head of zeros", "list of tensors"])
def test_damage_that_leaves_the_sizes_is_passed_over(runs: Path, corpus: Path, where: str, capsys: Captured) -> None:
    newest, before = runs / "run" / "checkpoints" / "step-6", weights(runs, "run", 6)
    path = newest / (".metadata" if where == "list of tensors" else "__0_0.distcp")
    content = bytearray(path.read_bytes())
    stored = {i.fqn: info for i, info in read_index(newest).storage_data.items()}
    kind = "optim.lm_head.weight.exp_avg" if where == "moment" else "model.lm_head.weight"
    middle = stored[kind].offset + stored[kind].length // 2
    if where in ("weight", "moment"):
        content[middle] ^= 1
    elif where == "frame":
        content[-20] ^= 255
    elif where == "tail of zeros":
        content[middle:] = bytes(len(content) - middle)
    else:
        content[: len(content) // 2] = bytes(len(content) // 2)
    path.write_bytes(content)
    assert (fault_in(newest) is None) == (where != "list of tensors")  # the sizes of the tensors' files tell nothing
    assert "step-6" in (damage_in(newest) or "")
    if where == "weight":
        with pytest.raises(UserError, match=r"damaged checkpoint: .*bytes from \d+ on have another checksum"):
            load_model_weights(newest)
    if where == "moment":
        load_model_weights(newest)  # is not what is read
    capsys.readouterr()
    assert run_here(corpus, runs, "name=run", "train.steps=6") == 0
    out = capsys.readouterr().out
    assert out.count("passing over a damaged checkpoint") == 1 and "step 4 from" in out
    assert damage_in(newest) is None  # written anew
    assert_same_weights(weights(runs, "run", 6), before)


def test_no_whole_checkpoint_is_an_error(runs: Path, corpus: Path, capsys: Captured) -> None:
    for step_dir in checkpoints_in(runs / "run"):
        (step_dir / "meta.json").unlink()
    capsys.readouterr()
    assert run_here(corpus, runs, "name=run", "train.steps=6") == 1
    assert "none of 3 is whole" in error_line(capsys)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["model=deltanet"], "model.mixer='efla'"),
        (["model.hidden_size=48"], "model.hidden_size=32"),
        (["model.tie_word_embeddings=true"], "model.tie_word_embeddings=False"),
        (["data.context=32"], "data.context=16"),
        (["data.mask_boundaries=true"], "data.mask_boundaries=False"),
        (["train.batch_tokens=128"], "train.batch_tokens=64"),
        (["seed=7"], "seed=42"),
    ],
)
def test_another_run_is_refused(runs: Path, corpus: Path, overrides: list[str], key: str, capsys: Captured) -> None:
    config = (runs / "run" / "config.yaml").read_text()
    assert run_here(corpus, runs, "name=run", "train.steps=8", *overrides) == 1
    line = error_line(capsys)
    assert f"saved with {key}" in line and "step-6" in line and "name=" in line
    assert (runs / "run" / "config.yaml").read_text() == config
    assert sorted(os.listdir(runs / "run" / "checkpoints")) == ["step-2", "step-4", "step-6"]


def test_other_data_are_refused(runs: Path, tmp_path: Path, capsys: Captured) -> None:
    other = write_corpus(tmp_path / "other", seed=1)
    assert run_here(other, runs, "name=run", "train.steps=8") == 1
    assert "data.fingerprint" in error_line(capsys)
    moved = tmp_path / "moved"  # the same bytes elsewhere are the same data
    write_corpus(moved)
    assert run_here(moved, runs, "name=run", "train.steps=8") == 0


def test_tensors_of_another_model_are_refused(runs: Path, corpus: Path, capsys: Captured) -> None:
    """Even where the description agrees, the tensor at fault is named."""
    meta = runs / "run" / "checkpoints" / "step-6" / "meta.json"
    said = read_meta(meta.parent)
    write_meta(meta.parent, replace(said, identity={**said.identity, "model.intermediate_size": 96}))
    assert run_here(corpus, runs, "name=run", "train.steps=8", "model.intermediate_size=96") == 1
    line = error_line(capsys)
    assert "another model" in line and "mlp.down_proj.weight is (32, 48) there and (32, 96) here" in line


def test_resume_from_a_path(runs: Path, corpus: Path, tmp_path: Path, capsys: Captured) -> None:
    step_4 = runs / "run" / "checkpoints" / "step-4"
    assert run_here(corpus, runs, "name=branch", "train.steps=6", f"resume={step_4}") == 0
    assert_same_weights(weights(runs, "branch", 6), weights(runs, "run", 6))
    capsys.readouterr()
    assert run_here(corpus, runs, "name=run", "train.steps=6", f"resume={step_4}") == 1
    assert "step-6 is later than" in error_line(capsys)  # else the next resume=auto would silently take step-6
    assert run_here(corpus, runs, "name=new", "train.steps=6", f"resume={tmp_path / 'nowhere'}") == 1
    assert "no checkpoint here" in error_line(capsys)
    assert not (runs / "new").exists()
    assert run_here(corpus, runs, "name=run", "train.steps=6", "resume=never") == 1
    assert "resume=never" in error_line(capsys)


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["tensors", "description", "known before"])
def test_full_disk(runs: Path, corpus: Path, where: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    if where == "tensors":
        monkeypatch.setattr(FileSystemWriter, "write_data", no_space)
    elif where == "description":
        monkeypatch.setattr(save, "_flush_directory", no_space)
    else:
        usage = shutil.disk_usage(runs)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    before = weights(runs, "run", 6)
    assert run_here(corpus, runs, "name=run", "train.steps=9", "train.save_every=2") == 1
    line = error_line(capsys)
    assert "no space left" in line and "step-8" in line
    assert sorted(os.listdir(runs / "run" / "checkpoints")) == ["step-2", "step-4", "step-6"]
    monkeypatch.undo()
    assert_same_weights(weights(runs, "run", 6), before)
    assert run_here(corpus, runs, "name=run", "train.steps=9") == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_really_full_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """The kernel's own ENOSPC in the middle of a tensor, through torch's writer."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        usage = shutil.disk_usage("/")  # as a quota would: the free space says nothing
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**12))
        assert run_here(corpus, small, "name=run", "train.steps=9", "train.save_every=1") == 1
        assert "no space left" in error_line(capsys)
        left = checkpoints_in(small / "run")
        assert left and all(fault_in(step_dir) is None for step_dir in left)
        assert not list((small / "run" / "checkpoints").glob("*.tmp"))
        load_model_weights(left[-1])
    finally:
        subprocess.run(["umount", small], check=True)


KILLED_WHILE_SAVING = """
import sys, time, pathlib
import train
from efla_lm.run import save

def hang(directory):  # all is written, the rename is to come
    if directory.name == "step-8.tmp":
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(100)

save._flush_directory = hang
sys.exit(train.main.run(sys.argv[2:]))
"""


def test_kill_while_saving(runs: Path, corpus: Path, tmp_path: Path) -> None:
    mark, settings = tmp_path / "saving", ("name=run", "train.steps=10", "train.save_every=2")
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_WHILE_SAVING, str(mark), *arguments(corpus, runs, *settings)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 100
        while not mark.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    folder = runs / "run" / "checkpoints"
    assert sorted(os.listdir(folder)) == ["step-2", "step-4", "step-6", "step-8.tmp"]
    assert newest_checkpoint(runs / "run") == folder / "step-6"
    assert run_here(corpus, runs, *settings) == 0  # the dead launch's lock does not hold
    assert sorted(os.listdir(folder)) == ["step-10", "step-2", "step-4", "step-6", "step-8"]
    assert run_here(corpus, tmp_path, "name=straight", *settings[1:]) == 0
    assert_same_weights(weights(runs, "run", 10), weights(tmp_path, "straight", 10))
    # what the dead launch wrote is gone
    assert metrics(runs, "run", "tokens") == metrics(tmp_path, "straight", "tokens")


def test_refuses_non_finite_weights(
    runs: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    plain = torch.optim.AdamW.step

    def poison(self, *args):
        plain(self, *args)
        local(self.param_groups[0]["params"][0].detach()).fill_(float("inf"))

    monkeypatch.setattr(torch.optim.AdamW, "step", poison)
    assert run_here(corpus, runs, "name=run", "train.steps=7") == 1
    assert "holds NaN or infinity" in error_line(capsys)
    assert newest_checkpoint(runs / "run") == runs / "run" / "checkpoints" / "step-6"
