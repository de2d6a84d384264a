"""How far `prepare` is, for whoever wants to show it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A moment of a run.

    `fraction` is an estimate: text read over text expected, which is the bytes on disk (the shards, for hub data) times
    the text per byte of the finished units; or the share of the token budget, if that is nearer its end.
    """

    units_done: int
    units: int
    fraction: float
    text_bytes: int  # read by this run so far
    tokens: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate from what this run has finished; None before the first unit."""
        return self.seconds * (1 - self.fraction) / self.fraction if self.fraction > 0 else None


class Watcher:
    """Collects reports from all threads and calls `show` at most once per `interval` seconds, and at the end."""

    def __init__(
        self,
        weights: list[int],
        budget: int | None,
        show: Callable[[Progress], None] | None,
        interval: float = 1.0,
    ) -> None:
        self._weights = [max(weight, 1) for weight in weights]
        self._budget = budget
        self._show, self._interval = show, interval
        self._lock = threading.Lock()
        self._start = self._shown = time.monotonic()
        self._done: set[int] = set()
        self._text_bytes = self._tokens = self._finished_bytes = 0

    def skip(self, unit: int, tokens: int) -> None:
        """Leave out a unit that an earlier run finished, with the tokens that it gave."""
        self._weights[unit] = 0
        if self._budget is not None:
            self._budget -= tokens

    def report(self, text_bytes: int, tokens: int) -> None:
        """Text and tokens since the caller's last report."""
        with self._lock:
            self._text_bytes += text_bytes
            self._tokens += tokens
            if time.monotonic() - self._shown >= self._interval:
                self._call()

    def finish(self, unit: int, text_bytes: int) -> None:
        """A unit is complete, and held so much text."""
        with self._lock:
            self._done.add(unit)
            self._finished_bytes += text_bytes
            self._call()

    def _call(self) -> None:
        self._shown = time.monotonic()
        if self._show is not None:
            self._show(
                Progress(
                    units_done=len(self._done),
                    units=sum(weight > 0 for weight in self._weights),
                    fraction=self._fraction(),
                    text_bytes=self._text_bytes,
                    tokens=self._tokens,
                    seconds=self._shown - self._start,
                )
            )

    def _fraction(self) -> float:
        units = sum(weight > 0 for weight in self._weights)
        if len(self._done) >= units:
            return 1.0
        finished = sum(self._weights[unit] for unit in self._done)
        fraction = finished / sum(self._weights)
        if self._finished_bytes:
            fraction *= self._text_bytes / self._finished_bytes  # what unfinished units have read so far
        if self._budget is not None and self._budget > 0:
            fraction = max(fraction, self._tokens / self._budget)
        return min(fraction, 0.99)
