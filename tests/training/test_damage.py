"""Any damage to a checkpoint is found before a step or a score, said in one line, and the next older one is taken."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import eval as eval_script
from efla_lm.errors import UserError
from efla_lm.run.checkpoint import find_checkpoint, load_model_weights, newest_checkpoint, weights_damage
from efla_lm.run.meta import META, UNSEALED_FORMAT, read_meta
from efla_lm.run.verify import damage_in, fault_in
from scripts import convert, export, generate
from tests.training.launch import assert_same_weights, run_here, weights

Captured = pytest.CaptureFixture[str]
FILES = (".metadata", "__0_0.distcp", "config.json", META)
CHANGING = (".metadata", "__0_0.distcp", META)  # files that differ between two checkpoints of a run


@pytest.fixture(scope="module")
def saved(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped at update 6 with checkpoints at 2, 4 and 6. Tests copy it."""
    runs = tmp_path_factory.mktemp("saved")
    assert run_here(corpus, runs, "name=run", *LENGTH, "train.stop_at=6") == 0
    return runs / "run"


LENGTH = ("model=mamba2", "train.steps=8", "train.save_every=2")


@pytest.fixture
def runs(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path


def flip(path: Path, position: int, bits: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


def edit_text(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) >= 1
    path.write_text(text.replace(before, after, 1))


def unseal(step_dir: Path, **changes: Any) -> None:
    """Write meta.json as format 1 did: sizes, and no checksum."""
    content = json.loads((step_dir / META).read_text())
    content = {key: value for key, value in content.items() if key not in ("sha256", "run", "block")}
    content |= {"format": UNSEALED_FORMAT, "files": {name: each["bytes"] for name, each in content["files"].items()}}
    (step_dir / META).write_text(json.dumps(content | changes, indent=1))


Damage = Callable[[Path], object]  # of the folder step-6, beside step-4
DAMAGES: dict[str, Damage] = {
    **{f"first byte of {name}": lambda d, name=name: flip(d / name, 0, 1) for name in FILES},
    **{f"byte in {name}": lambda d, name=name: flip(d / name, (d / name).stat().st_size // 2, 128) for name in FILES},
    **{f"{name} cut": lambda d, name=name: (d / name).write_bytes((d / name).read_bytes()[:-1]) for name in FILES},
    **{
        f"{name} longer": lambda d, name=name: (d / name).write_bytes((d / name).read_bytes() + b"\n") for name in FILES
    },
    **{f"{name} missing": lambda d, name=name: (d / name).unlink() for name in FILES},
    **{f"{name} empty": lambda d, name=name: (d / name).write_bytes(b"") for name in FILES},
    **{
        f"{name} of step-4": lambda d, name=name: shutil.copy(d.parent / "step-4" / name, d / name) for name in CHANGING
    },
    "another step": lambda d: edit_text(d / META, '"step": 6', '"step": 4'),
    "another epsilon": lambda d: edit_text(d / "config.json", '"norm_eps": ', '"norm_eps": 1'),
    "step-4 under the name of step-6": lambda d: (shutil.rmtree(d), shutil.copytree(d.parent / "step-4", d)),
    "checksum gone": lambda d: edit_text(d / META, '"sha256"', '"sha255"'),
    "format 1, step of another": lambda d: unseal(d, step=4),
    "format 1, identity null": lambda d: unseal(d, identity=None),
    "format 1, files null": lambda d: unseal(d, files=None),
    "format 1, step a word": lambda d: unseal(d, step="x"),
    "format 1, step below 0": lambda d: unseal(d, step=-6),
    "format 1, files elsewhere": lambda d: unseal(d, files={"../step-4/config.json": 1}),
    "format 1, no files": lambda d: unseal(d, files={}),
    "format 1, byte in a weight": lambda d: (unseal(d), flip(d / "__0_0.distcp", 2000, 1)),
    "a list": lambda d: (d / META).write_text("[]"),
    "deep": lambda d: (d / META).write_text("[" * 100_000),
    "not UTF-8": lambda d: (d / META).write_bytes(b'{"format": "\xff"}'),
    "a folder": lambda d: ((d / META).unlink(), (d / META).mkdir()),
}


@pytest.mark.parametrize("kind", list(DAMAGES))
def test_the_checkpoint_before_is_taken(kind: str, runs: Path) -> None:
    newest = runs / "run" / "checkpoints" / "step-6"
    DAMAGES[kind](newest)
    said: list[str] = []
    assert newest_checkpoint(runs / "run", said.append) == newest.with_name("step-4")
    assert len(said) == 1 and said[0].startswith(f"passing over a damaged checkpoint: {newest}") and "\n" not in said[0]
    with pytest.raises(UserError, match="damaged checkpoint"):
        find_checkpoint(newest)  # who names a step wants that step


@pytest.mark.parametrize("kind", ["byte in __0_0.distcp", "byte in .metadata", "another epsilon", "another step"])
def test_every_command_takes_the_checkpoint_before(
    kind: str, runs: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    DAMAGES[kind](runs / "run" / "checkpoints" / "step-6")
    run, out = f"checkpoint={runs / 'run'}", f"out={tmp_path / 'out'}"
    for command, arguments in (
        (export.main, [out]),
        (eval_script.main, ["tasks=heldout", f"{out}1"]),
        (generate.main, ["prompt=w3", "max_new_tokens=2", "device=cpu"]),
        (convert.main, ["to=transformers", f"{out}2"]),
    ):
        capsys.readouterr()
        assert command.run([run, *arguments]) == 0
        said = capsys.readouterr()
        assert (said.out + said.err).count("passing over a damaged checkpoint") == 1
        if command is export.main:
            assert "step-4 to" in said.out
    assert run_here(corpus, runs, "name=run", *LENGTH, "train.stop_at=5") == 0
    said = capsys.readouterr()
    assert said.out.count("passing over a damaged checkpoint") == 1 and "step 4 from" in said.out and not said.err
    named = f"checkpoint={runs / 'run' / 'checkpoints' / 'step-6'}"
    assert export.main.run([named, f"{out}3"]) == 1
    assert "damaged checkpoint" in capsys.readouterr().err


def test_every_byte_counts(saved: Path, tmp_path: Path) -> None:
    """One flip at 200 random places, in each file by its size and at least 20."""
    step_dir = tmp_path / "step-6"
    shutil.copytree(saved / "checkpoints" / "step-6", step_dir)
    assert damage_in(step_dir) is None
    draw = random.Random(0)
    for name in FILES:
        path = step_dir / name
        content = path.read_bytes()
        for _ in range(140 if name == "__0_0.distcp" else 20):
            position = draw.randrange(len(content))
            flip(path, position, 1 << draw.randrange(8))
            fault = damage_in(step_dir)
            assert fault is not None and str(step_dir) in fault and "\n" not in fault, (name, position)
            path.write_bytes(content)


def test_a_checkpoint_without_checksums_resumes(runs: Path, corpus: Path, capsys: Captured) -> None:
    """As the first versions wrote it, with the checks that it has."""
    newest = runs / "run" / "checkpoints" / "step-6"
    unseal(newest)
    assert read_meta(newest).format == UNSEALED_FORMAT
    assert fault_in(newest) is None and damage_in(newest) is None and weights_damage(newest) is None
    assert run_here(corpus, runs, "name=run", *LENGTH) == 0
    assert "step 6 from" in capsys.readouterr().out
    assert run_here(corpus, runs, "name=straight", *LENGTH) == 0
    assert_same_weights(weights(runs, "run", 8), weights(runs, "straight", 8))


def test_a_run_can_be_moved_and_renamed(runs: Path, corpus: Path, saved: Path) -> None:
    moved = runs / "elsewhere"
    (runs / "run").rename(moved)
    assert damage_in(moved / "checkpoints" / "step-6") is None
    assert run_here(corpus, runs, "name=elsewhere", *LENGTH, "train.stop_at=7") == 0
    assert read_meta(moved / "checkpoints" / "step-6").run == "run"
    assert read_meta(moved / "checkpoints" / "step-7").run == "elsewhere"


def test_no_uninitialised_memory_is_exported(runs: Path) -> None:
    """A chunk of length 0 in the index once left a tensor as it was in memory."""
    step_dir = runs / "run" / "checkpoints" / "step-6"
    path, content = step_dir / ".metadata", (step_dir / ".metadata").read_bytes()
    unseal(step_dir)
    whole = load_model_weights(step_dir)
    draw = random.Random(1)
    for position in draw.sample(range(len(content)), 150):
        flip(path, position, 1 << draw.randrange(8))
        if damage_in(step_dir) is None:
            found = load_model_weights(step_dir)
            assert all(torch.equal(found[name], tensor) for name, tensor in whole.items() if name in found)
        path.write_bytes(content)
