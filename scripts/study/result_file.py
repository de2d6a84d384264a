"""Result files: the JSON from which a study's tables and figures are made.

A file names the environment (hardware, versions, commit), the command and the settings, and holds one row for each
measurement. It is written whole after every row. A study that was stopped continues from its file: what is done is not
run again.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from efla_data.atomic import write_atomically
from efla_kernels.environment import describe_environment

from efla_lm.errors import UserError
from efla_lm.settings import check_output, list_keys, to_dict
from efla_lm.settings.compose import get
from efla_lm.settings.fields import MISSING

Row = dict[str, Any]
SAME = ("gpu", "device", "torch", "triton", "commit")  # parts of the environment in which all rows of a file agree


def environment(device: torch.device) -> Row:
    """Hardware, versions and commit, as every result file names them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"
    return describe_environment() | {"device": name, "threads": torch.get_num_threads()}


def portable(settings: Any, without: Sequence[str] = ()) -> Row:
    """The settings as a result file keeps them: without places on this machine, and without the keys named."""
    keys = list_keys(type(settings))
    left_out = {*without, *(name for name, info in keys.items() if info.path is not None)}
    return {name: value for name, value in to_dict(settings).items() if name not in left_out}


def command_line(study: str, settings: Any) -> str:
    """The command that gives these settings: all keys that differ from their defaults, but places on this machine."""
    parts = [f"python -m scripts.{study}"]
    for name, info in list_keys(type(settings)).items():
        value = get(settings, name)
        if info.path is None and info.default != MISSING and value != info.default:
            text = json.dumps(value) if not isinstance(value, str) else value
            parts.append(f"{name}={text}" if " " not in text else f"'{name}={text}'")
    return " ".join(parts)


def dated_path(out: str | None, name: str) -> Path:
    """`out`, or results/NAME-DATE-TIME.json. Raises OSError where it cannot be written."""
    path = Path(out or time.strftime(f"results/{name}-%Y%m%d-%H%M%S.json"))
    check_output(path)
    return path


def write(path: Path, content: Row) -> None:
    """Replace the file by a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read(path: str | Path, *, column: str | None = None, experiment: str | None = None) -> Row:
    """A result file whose rows have `column`, or that names `experiment`.

    Raises:
        UserError: the file is missing, no JSON, or of another study.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        fits = content.get("experiment") == experiment if experiment else all(column in r for r in content["rows"])
    except FileNotFoundError:
        raise UserError(f"{path}: no such result file") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        fits = False
    if not fits:
        kind = f"the experiment {experiment}" if experiment else f"this command, JSON with rows by {column}"
        raise UserError(f"{path}: expected a result file of {kind}")
    return dict(content)


def merge(contents: Sequence[Row], runs: list[Row]) -> Row:
    """One result from several whose rows were put together to `runs`: the first one's head, and all environments."""
    environments = [content["environment"] for content in contents]
    same = all(environment == environments[0] for environment in environments)
    return {**contents[0], "environment": environments[0] if same else environments, "runs": runs}


class ResultFile:
    """The result file of a study that works through parts and adds rows.

    head: what stands before the rows; all of it must be equal (the environment in `SAME`) for a file to be continued.
    Any other file is moved to NAME.old.json. rows: the name of the list of rows. key: the columns that tell rows apart;
    a row replaces an earlier one with equal columns. Without a key the rows are a dict, for the study to fill.
    """

    def __init__(self, path: Path, head: Row, key: Sequence[str] = (), rows: str = "rows") -> None:
        check_output(path)
        self.path, self.key, self.name = path, tuple(key), rows
        self.content: Row = {**head, rows: [] if key else {}, "done": [], "seconds": 0.0}
        if path.is_file() and (earlier := self._continued(head)) is not None:
            self.content = {**self.content, **earlier}
        self._earlier, self._start = self.content["seconds"], time.perf_counter()

    def _continued(self, head: Row) -> Row | None:
        """The content of the file if it belongs to the same work; else None, and the file is moved away."""
        try:
            found: Row = json.loads(self.path.read_text(encoding="utf-8"))
            same = all(_comparable(found[name]) == _comparable(head[name]) for name in head if name != "command")
            if same and isinstance(found["done"], list):
                return found
        except (ValueError, TypeError, KeyError):
            pass
        moved = self.path.with_suffix(".old.json")
        self.path.replace(moved)
        print(f"{self.path} holds another measurement: moved to {moved}", file=sys.stderr, flush=True)
        return None

    @property
    def rows(self) -> list[Row]:
        """All rows so far."""
        found: list[Row] = self.content[self.name]
        return found

    def missing(self, parts: Sequence[str]) -> Iterator[str]:
        """The parts that are not done, in their order; each counts as done once the next one is asked for."""
        for part in parts:
            if part not in self.content["done"]:
                yield part
                self.finish(part)

    def finish(self, part: str) -> None:
        """Note that a part is done and write the file."""
        self.content["done"].append(part)
        self.save()

    def add(self, row: Row) -> None:
        """Add a row, in the place of one with the same key, and write the file."""
        place = [row.get(name) for name in self.key]
        rows = self.rows
        same = [n for n, other in enumerate(rows) if [other.get(name) for name in self.key] == place]
        if same:
            rows[same[0]] = row
        else:
            rows.append(row)
        self.save()

    def save(self) -> None:
        """Write the file, with the seconds that the work has taken in all."""
        self.content["seconds"] = round(self._earlier + time.perf_counter() - self._start, 1)
        write(self.path, self.content)


def _comparable(part: Any) -> Any:
    """A part of the head as JSON gives it back; of an environment what must be equal."""
    if isinstance(part, dict) and "torch" in part:
        part = {name: part.get(name) for name in SAME}
    return json.loads(json.dumps(part))
