"""The worked example of docs/add_a_mixer.md: its three blocks, put in their places, are a model like the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evaluation.material import write_task_files
from tests.training.corpus import write_corpus
from tests.training.launch import arguments

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_mixer.md").read_text(encoding="utf-8")
END_OF_TABLE = "}  # fmt: skip\n"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, its commands and its configuration, with the example added."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("efla_lm", "conf", "tests/models"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "eval.py"):
        shutil.copy(ROOT / name, folder)
    code, row = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (option,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (folder / "efla_lm" / "models" / "mixers" / "retention.py").write_text(code)
    table = folder / "efla_lm" / "models" / "rules.py"
    before, rest = table.read_text().rsplit(END_OF_TABLE, 1)
    table.write_text(before + row + END_OF_TABLE + rest)
    (folder / "conf" / "model" / "retention.yaml").write_text(option)
    return folder


def run(tree: Path, *command: str) -> str:
    path = [tree, ROOT / "kernels", ROOT / "data"]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, timeout=100, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(180)
def test_it_is_trained_exported_and_evaluated_by_the_commands(tree: Path, tmp_path: Path) -> None:
    corpus, tasks = write_corpus(tmp_path / "corpus"), write_task_files(tmp_path / "tasks", documents=2)
    run(tree, "train.py", *arguments(corpus, tmp_path, "model=retention", "train.steps=30", "name=r"))
    rows = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    assert json.loads((tmp_path / "r" / "export" / "config.json").read_text())["mixer"] == "retention"
    names = "tasks.names=[heldout,sciq]"
    run(tree, "eval.py", f"checkpoint={tmp_path / 'r'}", "tasks=custom", names, f"tasks.local_dir={tasks}", "limit=2")
    (result,) = (tmp_path / "r" / "results").glob("*.json")
    assert set(json.loads(result.read_text())["results"]) == {"heldout", "sciq"}


@pytest.mark.timeout(120)
def test_it_passes_the_tests_of_every_model(tree: Path) -> None:
    """Padding, a prompt in two parts, packed documents, generation, saving, initial values: `MODELS` is the table."""
    files = ("test_cache", "test_packing", "test_generation", "test_save_load", "test_other_hands")
    options = ["-q", "-x", "-k", "retention", "-p", "no:cacheprovider", "--rootdir", str(tree)]
    out = run(tree, "-m", "pytest", *options, *(f"tests/models/{name}.py" for name in files))
    assert int(re.findall(r"(\d+) passed", out)[0]) >= 20


def test_every_file_that_the_page_names_exists() -> None:
    for path in re.findall(r"`((?:efla_lm|conf|tests|kernels)/[\w/.]+)`", PAGE):
        if "NAME" not in path and "retention" not in path:
            assert (ROOT / path).exists(), path
