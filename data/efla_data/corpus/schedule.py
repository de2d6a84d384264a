"""Which unit is processed when, by whom, and how much of it."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path

from efla_data.corpus.progress import Watcher
from efla_data.corpus.sources import Piece
from efla_data.corpus.unit import EVERY_HASH, Limits, UnitResult, load_result, unit_prefix
from efla_data.corpus.workers import Job, Worker

MARGIN = 1.25  # how much more is tokenised for a sample than it is thought to need


class Queue:
    """All units in order, with what is known of their tokens. Safe to use from several threads."""

    def __init__(self, folder: Path, units: list[list[Piece]], watcher: Watcher) -> None:
        self.folder, self.watcher = folder, watcher
        self.training = [index for index, unit in enumerate(units) if not unit[0].heldout]
        self.heldout = [index for index, unit in enumerate(units) if unit[0].heldout]
        self.results: dict[int, UnitResult] = {}
        self.lock = threading.Lock()
        for index in range(len(units)):
            result = load_result(unit_prefix(folder, index))
            if result is not None and self.usable(result):
                self.results[index] = result
                watcher.skip(index, result.train_tokens)
        # held-out units first: they are needed in any case, and usually small
        self.waiting_heldout = deque(index for index in self.heldout if index not in self.results)
        self.waiting = deque(index for index in self.training if index not in self.results)

    def usable(self, result: UnitResult) -> bool:
        """Whether what an earlier run made of a unit will do."""
        return True

    def limits(self) -> Limits:
        """How much of the next training unit to take."""
        return Limits()

    def enough(self) -> bool:
        """Whether no further training unit is needed."""
        return False

    def next(self) -> tuple[int, Limits] | None:
        """The next unit to process and how much of it; None when there is none, or when training has enough."""
        with self.lock:
            if self.waiting_heldout:
                return self.waiting_heldout.popleft(), Limits()
            if self.enough():
                self.waiting.clear()
            return (self.waiting.popleft(), self.limits()) if self.waiting else None

    def done(self, unit: int) -> None:
        """Take in the result of a unit."""
        result = load_result(unit_prefix(self.folder, unit))
        assert result is not None
        with self.lock:
            self.results[unit] = result
        self.watcher.finish(unit, sum(shard.text_bytes for shard in result.shards.values()))


class HeadQueue(Queue):
    """Training units until, without a gap, they reach `goal` tokens (counted are those that do, no further ones)."""

    def __init__(self, folder: Path, units: list[list[Piece]], watcher: Watcher, goal: int, cut: bool) -> None:
        self.goal, self.cut = goal, cut
        self.count = self.tokens = 0
        super().__init__(folder, units, watcher)

    def limits(self) -> Limits:
        """A unit that holds more than the goal is not read beyond it, if units may be cut."""
        return Limits(self.goal if self.cut else None)

    def enough(self) -> bool:
        """Moves `count` and `tokens` on to the first gap, or to the goal."""
        while self.tokens < self.goal and self.count < len(self.training):
            result = self.results.get(self.training[self.count])
            if result is None:
                return False
            self.count, self.tokens = self.count + 1, self.tokens + result.train_tokens
        return True


class SampleQueue(Queue):
    """All units, but of each training unit only documents whose hash is below a bound that will give `goal` tokens.

    The bound is lowered as finished units tell how many tokens there are for a byte on disk. `least`: a bound that was
    found to be needed; what was made with a lower one is made again.
    """

    def __init__(
        self, folder: Path, units: list[list[Piece]], watcher: Watcher, goal: int, least: int | None = None
    ) -> None:
        self.goal, self.least = goal, least
        self.weights = [max(sum(piece.bytes for piece in unit), 1) for unit in units]
        super().__init__(folder, units, watcher)

    def usable(self, result: UnitResult) -> bool:
        """Whether enough of the unit was taken."""
        return self.least is None or result.below >= self.least

    def limits(self) -> Limits:
        """All of the first units; then what MARGIN times the goal is thought to need."""
        if self.least is not None:
            return Limits(below=self.least)
        known = [(self.results[unit], self.weights[unit]) for unit in self.training if unit in self.results]
        seen = sum(result.below / EVERY_HASH * weight for result, weight in known)
        tokens = sum(result.train_tokens for result, _ in known)
        if not tokens:
            return Limits()
        total = tokens / seen * sum(self.weights[unit] for unit in self.training)
        return Limits(below=min(EVERY_HASH, int(MARGIN * self.goal / total * EVERY_HASH)))


def run_queue(queue: Queue, processes: int) -> None:
    """Process every unit that the queue still wants. The first error stops all; finished units stay."""
    processes = min(processes, len(queue.waiting_heldout) + len(queue.waiting))
    if processes > 1:
        _run_workers(queue, processes)
    elif processes == 1:
        job = Job(queue.folder)
        while (request := queue.next()) is not None:
            unit, limits = request
            job.run(unit, limits, queue.watcher.report)
            queue.done(unit)


def _run_workers(queue: Queue, processes: int) -> None:
    """One thread per worker process."""
    errors: list[BaseException] = []
    workers = [Worker(queue.folder) for _ in range(processes)]

    def serve(worker: Worker) -> None:
        try:
            while not errors and (request := queue.next()) is not None:
                unit, limits = request
                worker.run(unit, limits, queue.watcher.report)
                queue.done(unit)
        except Exception as error:  # handed to the main thread, which raises it
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not errors:
            for thread in threads:
                thread.join(0.05)
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def cut_at_goal(queue: HeadQueue) -> None:
    """Process the last unit that counts once more, up to the goal: its first pass may have gone further."""
    if queue.enough() and queue.tokens > queue.goal and queue.count > 1:
        last = queue.training[queue.count - 1]
        left = queue.goal - (queue.tokens - queue.results[last].train_tokens)
        Job(queue.folder).run(last, Limits(left), queue.watcher.report)
        queue.done(last)
