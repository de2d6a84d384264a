"""The figures of a run: `metrics.jsonl` first, then the trackers that the settings switch on.

The file has one JSON object per line, each written whole. On resume the rows after the resumed step are removed,
because the run writes them again, and so is a line that a crash cut short. NaN and infinity are written as null.
"""

import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from efla_data.atomic import naming, write_atomically

from efla_lm.errors import UserError
from efla_lm.run.directory import RunDirectory
from efla_lm.settings import LoggerSettings


class MetricsWriter:
    """Writes the rows of one run. All processes may have one; only that of the main process writes.

    resumed_step: rows with a larger `step` are removed on opening; 0 for a run that starts again.
    config: the configuration that trackers show.
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
        """Add one row, with `step`, the number of steps done. Raises OSError if the disk is full."""
        if "step" not in row:
            raise ValueError(f"a row of metrics needs a step, got {sorted(row)}")
        if self._file < 0:
            return
        clean = {name: _finite(value) for name, value in row.items()}
        line = (json.dumps(clean, allow_nan=False) + "\n").encode()
        with naming(self._path):
            written = os.write(self._file, line)
            while written < len(line):  # a nearly full disk takes part of a line; the next write raises
                written += os.write(self._file, line[written:])
        for tracker in list(self._trackers):
            self._attempt(tracker, lambda tracker=tracker: tracker.write(clean))  # type: ignore[misc]

    def close(self) -> None:
        """Close the file and the trackers. May be called more than once."""
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
    """All whole rows of a metrics file, without a line that a crash cut short."""
    rows = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            row = _parse(line)
            if row is not None:
                rows.append(row)
    return rows


def truncate_rows(path: Path, last_step: int) -> None:
    """Remove the rows after `last_step` and broken lines from a metrics file, which is replaced as a whole."""
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

        # purge_step hides the values that an earlier launch wrote after the resumed step
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """One Weights & Biases run for each run directory: its id is made once and kept in `wandb.json`.

    Plots are over our own `step`, by define_metric. wandb ignores values of a step of its own that goes back, as it
    does after a resume from an older checkpoint; here the new values are drawn beside those of the abandoned steps.

    Offline, each launch writes a part `wandb/offline-run-*-ID`. `wandb.json` and the last line of output list the
    parts; `wandb sync --id` uploads them in order as one run. Offline, resume="must" would start a new run in silence;
    "allow" with a fixed id does not.
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
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({name: value for name, value in row.items() if value is not None})

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
