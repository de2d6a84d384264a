"""Where numbers of a run go: `metrics.jsonl` first, then the trackers that are switched on.

One JSON object per line, written whole. On resume the rows after the resumed step are taken out, because the run writes
them again; a line cut short by a crash goes as well. A number that is not finite is written as null.
"""

import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.run.directory import RunDirectory, naming, write_atomically
from efla_lm.settings import LoggerSettings


class MetricsWriter:
    """Write rows of one run. Every process may hold one; only the main process's writes (one file, one tracker run).

    resumed_step: rows with a larger `step` are dropped on opening; 0 for a run that starts over.
    config: what trackers show as the run's configuration.
    """

    def __init__(
        self, run: RunDirectory, logger: LoggerSettings, *, resumed_step: int = 0, config: Mapping[str, Any]
    ) -> None:
        self._file = -1
        self._trackers: list[_Tensorboard | _Wandb] = []
        if not run.main:
            return
        self._path = run.metrics
        truncate_rows(run.metrics, resumed_step)
        self._file = os.open(run.metrics, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if logger.tensorboard:
            self._trackers.append(_Tensorboard(run.path / "tensorboard", resumed_step))
        if logger.wandb and logger.wandb_mode != "disabled":
            self._trackers.append(_Wandb(run, logger, config))

    def write(self, row: Mapping[str, int | float | str | None]) -> None:
        """Add one row; it holds `step`, the number of updates done. Raises OSError when the disk is full."""
        if "step" not in row:
            raise ValueError(f"a row of metrics needs a step, got {sorted(row)}")
        if self._file < 0:
            return
        clean = {name: _finite(value) for name, value in row.items()}
        line = (json.dumps(clean, allow_nan=False) + "\n").encode()
        with naming(self._path):
            written = os.write(self._file, line)
            while written < len(line):  # a nearly full disk takes part of a line; the next write says why
                written += os.write(self._file, line[written:])
        for tracker in list(self._trackers):
            self._attempt(tracker, lambda tracker=tracker: tracker.write(clean))  # type: ignore[misc]

    def close(self) -> None:
        """Finish files and trackers. May be called more than once."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        for tracker in list(self._trackers):
            self._attempt(tracker, tracker.close)
        self._trackers = []

    def _attempt(self, tracker: "_Tensorboard | _Wandb", act: Callable[[], None]) -> None:
        """A tracker that fails is left out from then on: the run and its metrics.jsonl do not depend on it."""
        try:
            act()
        except Exception as error:  # of a network, a disk or the tracker itself
            self._trackers.remove(tracker)
            name = type(tracker).__name__.removeprefix("_").lower()
            print(f"warning: {name} failed and gets no more rows ({type(error).__name__}: {error})", file=sys.stderr)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a metrics file; a line cut short by a crash is left out."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            row = _parse(line)
            if row is not None:
                rows.append(row)
    return rows


def truncate_rows(path: Path, last_step: int) -> None:
    """Take the rows after `last_step`, and broken lines, out of a metrics file, by replacing it whole."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    kept = [line for line in lines if (row := _parse(line)) is not None and row["step"] <= last_step]
    if len(kept) < len(lines):
        write_atomically(path, "".join(kept))


def _parse(line: str) -> dict[str, Any] | None:
    if not line.endswith("\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _finite(value: int | float | str | None) -> int | float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Tensorboard:
    def __init__(self, folder: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what an earlier launch wrote beyond the step that is resumed
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """One Weights & Biases run for the life of a run directory: its id is made once and kept in `wandb.json`.

    Offline, each launch leaves a part `wandb/offline-run-*-ID`; the parts are listed in `wandb.json` and at the end;
    `wandb sync --id` uploads them in order as one run. (Offline, resume="must" would start a fresh run without a word;
    "allow" with a fixed id does not.)
    """

    def __init__(self, run: RunDirectory, logger: LoggerSettings, config: Mapping[str, Any]) -> None:
        import wandb

        self._note, self._folder = run.path / "wandb.json", run.path / "wandb"
        self._mode = logger.wandb_mode
        self._id = self._load_id()
        write_atomically(self._note, json.dumps({"id": self._id, "parts": self._parts()}, indent=1) + "\n")
        try:
            self._run = wandb.init(
                project=logger.wandb_project,
                entity=logger.wandb_entity,
                name=run.name,
                id=self._id,
                resume="allow",
                mode="offline" if logger.wandb_mode == "offline" else "online",
                dir=str(run.path),
                tags=logger.wandb_tags,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"logger.wandb: {' '.join(str(error).split())}; run `wandb login`, or set logger.wandb_mode=offline"
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None}, step=row["step"])

    def close(self) -> None:
        self._run.finish()
        parts = self._parts()
        write_atomically(self._note, json.dumps({"id": self._id, "parts": parts}, indent=1) + "\n")
        if self._mode == "offline":
            folder = os.path.relpath(self._folder)
            command = f"wandb sync --id {self._id} {folder}/offline-run-*"
            print(
                f"wandb: {len(parts)} offline part(s) of run {self._id}; to upload them as one: {command}", flush=True
            )

    def _parts(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob(f"*run-*-{self._id}"))

    def _load_id(self) -> str:
        try:
            return str(json.loads(self._note.read_text())["id"])
        except FileNotFoundError:
            return uuid.uuid4().hex[:8]
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{self._note}: expected the id of the tracker run, cannot read it; delete the file"
            ) from error
