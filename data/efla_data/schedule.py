"""Which unit is processed when, by whom, and where a token budget ends."""

from __future__ import annotations

import threading
from pathlib import Path

from efla_data.progress import Watcher
from efla_data.sources import Piece
from efla_data.unit import UnitResult, load_result, unit_prefix
from efla_data.workers import Job, Worker


def run_units(
    folder: Path, units: list[list[Piece]], max_tokens: int | None, processes: int, watcher: Watcher
) -> dict[int, UnitResult]:
    """Process every unit that is needed and not yet done; the results that count, by unit.

    With `max_tokens` the training units count up to the one in which their sum, in order, reaches it; that one is cut
    there (processed once more with what is left of the budget): the outcome does not depend on who was how fast.
    """
    queue = _Queue(folder, units, max_tokens, watcher)
    processes = min(processes, len(queue.waiting))
    if processes == 1:
        job = Job(folder)
        while (unit := queue.next()) is not None:
            job.run(unit, max_tokens, watcher.report)
            queue.done(unit)
    elif processes > 1:
        _run_workers(folder, queue, processes, max_tokens, watcher)
    return _within_budget(folder, queue, max_tokens, watcher)


class _Queue:
    """Units in order, with what is known of their tokens. Safe to use from several threads."""

    def __init__(self, folder: Path, units: list[list[Piece]], max_tokens: int | None, watcher: Watcher) -> None:
        self.folder, self.max_tokens, self.watcher = folder, max_tokens, watcher
        self.training = [index for index, unit in enumerate(units) if not unit[0].heldout]
        self.heldout = [index for index, unit in enumerate(units) if unit[0].heldout]
        self.results: dict[int, UnitResult] = {}
        self.lock = threading.Lock()
        for index in range(len(units)):
            result = load_result(unit_prefix(folder, index))
            if result is not None:
                self.results[index] = result
                watcher.skip(index, result.train_tokens)
        # held-out units first: they are needed in any case, and usually small
        self.waiting = [index for index in self.heldout + self.training if index not in self.results]

    def next(self) -> int | None:
        """The next unit to process; None when there is none, or when training has enough."""
        with self.lock:
            if self.waiting and self.waiting[0] in self.training and self.enough():
                self.waiting.clear()
            return self.waiting.pop(0) if self.waiting else None

    def done(self, unit: int) -> None:
        """Take in the result of a unit."""
        result = load_result(unit_prefix(self.folder, unit))
        assert result is not None
        with self.lock:
            self.results[unit] = result
        self.watcher.finish(unit, sum(shard.text_bytes for shard in result.shards.values()))

    def enough(self) -> bool:
        """Whether the finished training units reach the budget without a gap before them."""
        return self.max_tokens is not None and self.last_needed()[1] >= self.max_tokens

    def last_needed(self) -> tuple[int, int]:
        """(how many training units count, their tokens), up to the first gap or to the budget."""
        tokens = 0
        for count, unit in enumerate(self.training):
            if unit not in self.results or (self.max_tokens is not None and tokens >= self.max_tokens):
                return count, tokens
            tokens += self.results[unit].train_tokens
        return len(self.training), tokens


def _run_workers(folder: Path, queue: _Queue, processes: int, max_tokens: int | None, watcher: Watcher) -> None:
    """One thread per worker process. The first error stops all; finished units stay."""
    errors: list[BaseException] = []
    workers = [Worker(folder) for _ in range(processes)]

    def serve(worker: Worker) -> None:
        try:
            while not errors and (unit := queue.next()) is not None:
                worker.run(unit, max_tokens, watcher.report)
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


def _within_budget(folder: Path, queue: _Queue, max_tokens: int | None, watcher: Watcher) -> dict[int, UnitResult]:
    count, tokens = queue.last_needed()
    counted = queue.training[:count]
    if max_tokens is not None and tokens > max_tokens and count > 1:
        last = counted[-1]
        Job(folder).run(last, max_tokens - (tokens - queue.results[last].train_tokens), watcher.report)
        queue.done(last)
    return {unit: queue.results[unit] for unit in counted + queue.heldout}
