"""A checkpoint, an export or a tokenizer from somebody else runs no code, whatever command opens it."""

from __future__ import annotations

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import eval as eval_script
from efla_lm.run.checksums import file_sums
from efla_lm.run.meta import read_meta, write_meta
from efla_lm.settings.cli import EntryPoint
from scripts import convert, export, generate
from tests.training.launch import run_here

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 updates with one checkpoint. Tests copy it."""
    runs = tmp_path_factory.mktemp("saved")
    assert run_here(corpus, runs, "name=run", "model=mamba2", "train.steps=3", "train.stop_at=2") == 0
    return runs / "run"


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.mark}",)


def replace_file(step_dir: Path, name: str, content: bytes) -> None:
    """Put another file into a checkpoint, with a description that fits it: its maker can do that."""
    (step_dir / name).write_bytes(content)
    meta = read_meta(step_dir)
    write_meta(step_dir, replace(meta, files=meta.files | file_sums([step_dir / name], meta.block)))


COMMANDS: dict[str, tuple[EntryPoint, list[str]]] = {
    "eval": (eval_script.main, ["checkpoint={run}", "tasks=heldout", "out={out}"]),
    "export": (export.main, ["checkpoint={run}", "out={out}"]),
    "generate": (generate.main, ["checkpoint={run}", "prompt=w3", "max_new_tokens=2", "device=cpu"]),
    "convert": (convert.main, ["checkpoint={run}", "to=transformers", "out={out}"]),
}


def run_command(name: str, run: Path, corpus: Path, out: Path) -> int:
    if name == "train":
        return run_here(corpus, run.parent, "name=run", "model=mamba2", "train.steps=3")
    command, arguments = COMMANDS[name]
    return command.run([argument.format(run=run, out=out) for argument in arguments])


@pytest.mark.parametrize("name", ["train", *COMMANDS])
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_pickle_in_a_checkpoint_runs_no_code(
    name: str, file: str, run: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    mark, out = tmp_path / "ran", tmp_path / "out"
    step_dir = run / "checkpoints" / "step-2"
    data = pickle.dumps(Evil(mark))
    if file != ".metadata":
        data += bytes((step_dir / file).stat().st_size - len(data))
    replace_file(step_dir, file, data)
    capsys.readouterr()
    assert run_command(name, run, corpus, out) == 1
    assert not mark.exists() and not out.exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and ("step-2" in lines[0] or "none of 1 is whole" in lines[0]), lines


@pytest.mark.parametrize("name", ["train", *COMMANDS])
def test_the_same_commands_work_on_an_honest_one(name: str, run: Path, corpus: Path, tmp_path: Path) -> None:
    assert run_command(name, run, corpus, tmp_path / "out") == 0
