"""The directions of import between the rooms of the house: a test reads them from the source."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = {"efla_kernels", "efla_data", "efla_lm", "scripts", "train", "eval"}
ROOMS = {
    "efla_kernels": ROOT / "kernels" / "efla_kernels",
    "efla_data": ROOT / "data" / "efla_data",
    "efla_lm": ROOT / "efla_lm",
}


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every absolute module that the file imports, at whatever depth, with its line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or "", node.lineno


def python_files(*folders: Path) -> list[Path]:
    return sorted(p for f in folders for p in ([f] if f.is_file() else f.rglob("*.py")))


def violations(files: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files
        for name, line in imports(path)
        if name.split(".")[0] in forbidden
    ]


def test_kernels_import_torch_and_triton_only() -> None:
    allowed = {"torch", "triton", "efla_kernels"} | set(sys.stdlib_module_names)
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(ROOMS["efla_kernels"])
        for name, line in imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert not found, found


@pytest.mark.parametrize(
    ("room", "forbidden"),
    [
        ("efla_data", OURS - {"efla_data"}),
        ("efla_lm", {"scripts", "train", "eval", "efla_lm.scripts"}),
    ],
)
def test_rooms_do_not_import_what_stands_above_them(room: str, forbidden: set[str]) -> None:
    found = violations(python_files(ROOMS[room]), forbidden)
    assert not found, found


def test_nothing_imports_an_entry_point() -> None:
    found = violations(python_files(ROOT / "scripts", ROOT / "train.py", ROOT / "eval.py"), {"train", "eval"})
    assert not found, found


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("hydra", ["train.py", "eval.py", "scripts/", "efla_lm/settings/"]),
        ("omegaconf", ["train.py", "eval.py", "scripts/", "efla_lm/settings/"]),
        ("accelerate", ["efla_lm/parallel/distributed.py"]),
        ("wandb", ["efla_lm/run/metrics.py"]),
        ("lm_eval", ["efla_lm/evaluation/", "scripts/eval_compare/", "scripts/eval_speed/"]),
    ],
)
def test_each_big_library_has_one_home(library: str, homes: list[str]) -> None:
    files = python_files(*ROOMS.values(), ROOT / "scripts", ROOT / "train.py", ROOT / "eval.py")
    outside = [p for p in files if not p.relative_to(ROOT).as_posix().startswith(tuple(homes))]
    found = violations(outside, {library})
    assert not found, found
