"""Values that a command cannot mean: exit code 1 and one line that names the key, before anything is made or read."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

CASES = [
    ("mad", "rates=[-1]", "rates=[-1.0]: expected a list of numbers above 0"),
    ("mad", "weight_decays=[-0.1]", "weight_decays=[-0.1]: expected a list of numbers, each at least 0"),
    ("mad", "backend=triton", "backend=triton needs a GPU"),
    ("mad", "out={file}/x", "{file}/x: not a directory (out={file}/x)"),
    ("smnist", "rates=[0]", "rates=[0.0]: expected a list of numbers above 0"),
    ("smnist", "images.pool=0", "images.pool=0: expected at least 1"),
    ("smnist", "images.test=0", "images.test=0: expected at least 1"),
    ("smnist", "backend=fla", "backend=fla needs a GPU"),
    ("smnist", "out={file}/x", "{file}/x: not a directory (out={file}/x)"),
    ("stability", "checkpoint=x sizes=[]", "sizes=[]: expected a list of numbers above 0"),
    ("stability", "checkpoint=x sizes=[-1]", "sizes=[-1.0]: expected a list of numbers above 0"),
    ("inspect_data", "count=0", "count=0: expected 1 or more"),
    ("inspect_data", "characters=-1", "characters=-1: expected 1 or more"),
    ("contamination", "tasks=[{file}] out={folder}/a/b/c processes=0", "processes=0"),
    ("data_speed", "readers=0", "readers=0: expected at least 1"),
    ("data_speed", "seconds=0", "seconds=0.0: expected more than 0"),
    ("eval_compare", "checkpoint=x limit=0", "limit=0: expected at least 1"),
    ("eval_compare", "checkpoint=x stock_batch_size=0", "stock_batch_size=0: expected at least 1"),
    ("eval_speed", "tokenizer=x tasks=[]", "tasks=[]: expected at least one task"),
    ("eval_speed", "tokenizer=x tasks=[piqa,piqa]", "each once"),
    ("loss_equality", "out={folder}", "{folder}: is a directory (out={folder}); expected a file"),
    ("throughput", "device=cuda", "device=cuda but torch sees no CUDA device"),
    ("throughput", "device=cpu out={file}/x.json", "(out={file}/x.json); a file is in the way"),
    ("plan", "price=-1", "price=-1.0: expected 0 or more, or null"),
    ("plan", "gpus=8 parallel=hsdp parallel.replicate=3", "replicate=3 x shard=2 = 6, but gpus=8"),
    ("plan", "gpus=2 parallel=hsdp parallel.replicate=3", "replicate=3 x shard=0 = 0, but gpus=2"),
    ("reproduce_table1", "price=-1", "price=-1.0: expected 0 or more, or null"),
]


@pytest.mark.parametrize(("script", "arguments", "said"), CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_one_line_names_the_key(
    script: str,
    arguments: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    given = [argument.format(file=file, folder=folder) for argument in arguments.split()]
    package = importlib.import_module(f"scripts.{script}")
    module = importlib.import_module(f"scripts.{script}.__main__") if hasattr(package, "__path__") else package
    assert module.main.run(given) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said.format(file=file, folder=folder) in line
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
