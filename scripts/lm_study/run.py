"""Train the trials of the study that a result file lacks, several at a time, and keep what each of them came to."""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.run.metrics import read_rows
from scripts.lm_study import worker
from scripts.lm_study.settings import LmStudySettings, Trial, train_arguments
from scripts.study.launcher import last_error

Record = dict[str, Any]
APART_SECONDS = 7.0  # first runs begin so far apart: runs that end together leave the GPU idle while they save
ENDED = ("done", "diverged")  # states of a run that is not run again
DIVERGED = re.compile(r"error: (\d+ updates in a row were not finite.*?)(?:;|$)", re.MULTILINE)


class Trainers:
    """Processes that train `parallel_runs` trials at a time, each one run after another; a context manager.

    deadline: the time (`time.time`) from which no run begins and those under way save and stop, or None. Ctrl-C and
    SIGTERM do the same at once.
    """

    def __init__(self, settings: LmStudySettings, deadline: float | None) -> None:
        self._settings, self._deadline = settings, deadline
        context = get_context("spawn")
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(settings.parallel_runs, context, worker.initialise, (self._stop,))
        self._handlers: dict[int, Any] = {}
        self._begun = 0

    def __enter__(self) -> Trainers:
        self._settings.runs.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, lambda *_: self._stop.set())
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self, trials: Sequence[Trial], keep: Callable[[Record], None]) -> bool:
        """Train `trials` in their order; `keep` gets the record of each as it ends. Whether all of them have ended."""
        waiting, running = deque(trials), dict[Future[tuple[int, float]], Trial]()
        complete = True
        while running or (waiting and not self._over()):
            while waiting and len(running) < self._settings.parallel_runs and not self._over():
                trial = waiting.popleft()
                log = self._settings.runs / f"{trial.name}.log"
                delay = APART_SECONDS * self._begun if self._begun < self._settings.parallel_runs else 0.0
                arguments = train_arguments(trial, self._settings)
                running[self._pool.submit(worker.train, arguments, log, self._deadline, delay)] = trial
                self._begun += 1
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                trial = running.pop(future)
                try:
                    code, seconds = future.result()
                except BrokenProcessPool as error:
                    log = self._settings.runs / f"{trial.name}.log"
                    raise UserError(f"{trial.name}: the process that trained it died; see {log}") from error
                record = record_of(trial, self._settings, code, seconds)
                complete &= record["state"] in ENDED
                keep(record)
        return complete and not waiting

    def _over(self) -> bool:
        return self._stop.is_set() or (self._deadline is not None and time.time() > self._deadline)


def record_of(trial: Trial, settings: LmStudySettings, code: int, seconds: float) -> Record:
    """What a run has come to: `done`, `diverged`, `stopped` before its last update, or `failed` for another reason.

    `seconds` are the wall time of all launches, those of a stopped run included, with `parallel_runs` on one device.
    """
    folder, log = settings.runs / trial.name, settings.runs / f"{trial.name}.log"
    text = log.read_text(encoding="utf-8")
    diverged = DIVERGED.search(text) if code else None
    folder.mkdir(exist_ok=True)  # a run may be stopped before it has made it
    rows = read_rows(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    training = [row for row in rows if "loss" in row]
    validations = [[row["step"] * settings.batch_tokens, row["val_loss"]] for row in rows if "val_loss" in row]
    done = any(row["step"] == settings.steps and "val_loss" in row for row in rows)
    state = "diverged" if diverged else "failed" if code else "done" if done else "stopped"
    rates = [row["tokens_per_second"] for row in training if row["tokens_per_second"] is not None]
    record: Record = {
        **asdict(trial), "state": state, "seconds": round(seconds + _earlier_seconds(folder), 2),
        "heldout": validations[-1][1] if state == "done" else None,
        "validations": validations, "training": [[row["tokens"], row["loss"]] for row in training],
        "largest_grad_norm": max((row["grad_norm"] for row in training if row["grad_norm"] is not None), default=None),
        "skipped_steps": training[-1]["skipped_steps"] if training else 0,
        "tokens_per_second": statistics.median(rates) if rates else None,
        "parallel_runs": settings.parallel_runs,
    }  # fmt: skip
    if code:
        record["reason"] = diverged[1] if diverged else last_error(text) or f"exit code {code}"
    if state == "stopped":
        (folder / "study.json").write_text(json.dumps({"seconds": record["seconds"]}), encoding="utf-8")
    elif state != "failed" and not settings.keep_runs:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        shutil.rmtree(folder / "export", ignore_errors=True)
    return record


def _earlier_seconds(folder: Path) -> float:
    """Seconds of the launches before, kept beside a stopped run."""
    path = folder / "study.json"
    return float(json.loads(path.read_text(encoding="utf-8"))["seconds"]) if path.exists() else 0.0
