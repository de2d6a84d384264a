"""How far `prepare` is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The state of a run at one moment.

    `fraction` is an estimate: text read / text expected, where the expected text is the bytes on disk (for hub data,
    the shards) times the text per byte of the finished chunks; or the share of the token budget, if that is larger.
    """

    chunks_done: int
    chunks: int
    fraction: float
    text_bytes: int  # read by this run so far
    tokens: int
    seconds: float

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the chunks that this run finished; None before the first one."""
        return self.seconds * (1 - self.fraction) / self.fraction if self.fraction > 0 else None


class Watcher:
    """Adds up reports and calls `show` at most once per `interval` seconds, and when a chunk is complete."""

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
        self._start = self._shown = time.monotonic()
        self._done: set[int] = set()
        self._text_bytes = self._tokens = self._finished_bytes = 0

    def skip(self, chunk: int, tokens: int) -> None:
        """Leave out a chunk of so many tokens that an earlier run finished."""
        self._weights[chunk] = 0
        if self._budget is not None:
            self._budget -= tokens

    def report(self, text_bytes: int, tokens: int) -> None:
        """Text and tokens since the last report."""
        self._text_bytes += text_bytes
        self._tokens += tokens
        if time.monotonic() - self._shown >= self._interval:
            self._call()

    def finish(self, chunk: int, text_bytes: int) -> None:
        """A chunk of so much text is complete."""
        self._done.add(chunk)
        self._finished_bytes += text_bytes
        self._call()

    def _call(self) -> None:
        self._shown = time.monotonic()
        if self._show is not None:
            self._show(
                Progress(
                    chunks_done=len(self._done),
                    chunks=sum(weight > 0 for weight in self._weights),
                    fraction=self._fraction(),
                    text_bytes=self._text_bytes,
                    tokens=self._tokens,
                    seconds=self._shown - self._start,
                )
            )

    def _fraction(self) -> float:
        chunks = sum(weight > 0 for weight in self._weights)
        if len(self._done) >= chunks:
            return 1.0
        finished = sum(self._weights[chunk] for chunk in self._done)
        fraction = finished / sum(self._weights)
        if self._finished_bytes:
            fraction *= self._text_bytes / self._finished_bytes  # counts what unfinished chunks have read
        if self._budget is not None and self._budget > 0:
            fraction = max(fraction, self._tokens / self._budget)
        return min(fraction, 0.99)
