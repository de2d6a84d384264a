"""A checkpoint, an export or a tokenizer from somebody else runs no code, whatever command opens it."""

from __future__ import annotations

import json
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


CODE = "open({mark!r}, 'w')\nclass Custom:\n    pass\n"


def with_code(folder: Path, name: str, mark: Path, auto_map: dict[str, object], **fields: object) -> None:
    """Let a JSON file of a model folder ask for code beside it, which makes a file."""
    (folder / "custom.py").write_text(CODE.format(mark=str(mark)))
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**content, "auto_map": auto_map, **fields}))


CUSTOM_CONFIG = {"AutoConfig": "custom.Custom", "AutoModelForCausalLM": "custom.Custom"}
CUSTOM_TOKENIZER = {"AutoTokenizer": ["custom.Custom", "custom.Custom"]}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("where", ["config", "config of a known type", "tokenizer", "tokenizer of a known class"])
def test_code_in_a_model_folder_is_never_run(
    name: str, where: str, run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Where transformers would ask `run the custom code? [y/N]`, too: the answer is not asked for."""
    assert export.main.run([f"checkpoint={run}"]) == 0
    (run / "checkpoints").rename(run / "away")
    folder, mark = run / "export", tmp_path / "ran"
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    if where.startswith("config"):
        known = {} if "known" in where else {"model_type": "custom"}
        with_code(folder, "config.json", mark, CUSTOM_CONFIG, **known)
    else:
        known = {} if "known" in where else {"tokenizer_class": "Custom"}
        with_code(folder, "tokenizer_config.json", mark, CUSTOM_TOKENIZER, **known)
    capsys.readouterr()
    code = run_command(name, folder, corpus, tmp_path / "out")
    assert not mark.exists()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    if "known" not in where and not (name in ("export", "convert") and where == "tokenizer"):  # which read it not
        assert code == 1 and error.count("error: ") == 1
        assert name == "export" or "code that comes with it" in error


def test_code_beside_a_tokenizer_of_training_is_never_run(
    run: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    tokens, mark = tmp_path / "tokens", tmp_path / "ran"
    shutil.copytree(corpus, tokens)
    with_code(tokens / "tokenizer", "tokenizer_config.json", mark, CUSTOM_TOKENIZER, tokenizer_class="Custom")
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    live = ("eval.every=1", "eval.tasks=[heldout]")
    assert run_here(tokens, tmp_path, "name=new", "train.steps=1", "schedule.warmup_updates=0", *live) == 1
    assert not mark.exists() and "code that comes with it" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["meta.json", "link to a folder", "link to a file", "link in the token files"])
def test_no_file_from_outside_a_run_is_copied(
    kind: str, run: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    private, out = tmp_path / "private", tmp_path / "out"
    private.mkdir()
    (private / "tokenizer.json").write_text("a secret")
    (private / "notes.txt").write_text("a secret")
    tokenizer, step_dir = run / "tokenizer", run / "checkpoints" / "step-2"
    if kind == "meta.json":
        write_meta(step_dir, replace(read_meta(step_dir), tokenizer="../../../private"))
    elif kind == "link to a folder":
        shutil.rmtree(tokenizer)
        tokenizer.symlink_to(private)
    elif kind == "link to a file":
        (tokenizer / "tokenizer.json").unlink()
        (tokenizer / "tokenizer.json").symlink_to(private / "tokenizer.json")
    else:
        tokens = tmp_path / "tokens"
        shutil.copytree(corpus, tokens)
        (tokens / "tokenizer" / "vocab.txt").symlink_to(private / "notes.txt")
        assert run_here(tokens, tmp_path, "name=new", "train.steps=1", "schedule.warmup_updates=0") == 1
        assert "outside the folder" in capsys.readouterr().err
        return
    for command in ("export", "convert"):
        capsys.readouterr()
        assert run_command(command, run, corpus, out) == 1
        assert "error: " in capsys.readouterr().err
        assert not out.exists()


def test_an_export_takes_the_files_of_a_tokenizer_alone(run: Path, tmp_path: Path) -> None:
    for name in ("config.json", "modeling.py", "model.safetensors", "notes.txt"):
        (run / "tokenizer" / name).write_text("from the tokenizer's folder")
    assert export.main.run([f"checkpoint={run}", f"out={tmp_path / 'out'}"]) == 0
    found = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert not any(b"from the tokenizer's" in content for content in found.values())
    assert {"tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"} <= found.keys()


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b"null", b'{"a": 1}'])
def test_a_damaged_export_is_one_clear_error(
    name: str, file: str, content: bytes, exported: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    folder = tmp_path / "run" / "export"
    shutil.copytree(exported, folder)
    (folder / file).write_bytes(content)
    capsys.readouterr()
    code = run_command(name, folder, corpus, tmp_path / "out")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == (code == 1), lines


@pytest.fixture(scope="module")
def exported(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "export"
    assert export.main.run([f"checkpoint={saved}", f"out={folder}"]) == 0
    return folder


PYTHON_TAG = b"a: !!python/object/apply:os.system ['touch MARK']"


@pytest.mark.parametrize("content", [PYTHON_TAG, b"\xff", b"a: [", b"- 1", b"data: 3", b"data: {}"])
def test_a_config_of_a_run_that_is_none_is_one_clear_error(
    content: bytes, run: Path, corpus: Path, tmp_path: Path, capsys: Captured
) -> None:
    (run / "config.yaml").write_bytes(content.replace(b"MARK", str(tmp_path / "ran").encode()))
    capsys.readouterr()
    assert run_command("eval", run, corpus, tmp_path / "out") == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "config.yaml" in lines[0] and not (tmp_path / "ran").exists(), lines
