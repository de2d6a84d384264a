"""Result files of the benchmarks: where they lie, and how they are written and read."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.settings import check_output, list_keys, to_dict


def result_path(out: str | None, name: str) -> Path:
    """`out`, or results/NAME-DATE-TIME.json. Raises OSError where it cannot be written."""
    path = Path(out or time.strftime(f"results/{name}-%Y%m%d-%H%M%S.json"))
    check_output(path)
    return path


def recorded(settings: Any) -> dict[str, Any]:
    """The settings as a result file keeps them: without places on this machine."""
    keys = list_keys(type(settings))
    return {name: value for name, value in to_dict(settings).items() if keys[name].path is None}


def save(path: Path, result: dict[str, Any]) -> None:
    """Replace the file by a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def load(path: Path, column: str) -> dict[str, Any]:
    """A result file whose rows have `column`, which tells the benchmarks apart. Raises FileNotFoundError, which the
    commands report, and UserError for another file."""
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fits = all(column in row for row in result["rows"])
    except (ValueError, TypeError, KeyError):
        fits = False
    if not fits:
        raise UserError(f"{path}: expected a result file of this command, JSON with rows by {column}")
    return result
