"""Tokenise the chunks that a recipe needs, on worker processes, until the documents that stay reach the token budget.

A queue says which chunk comes next and how much of it. The result does not depend on which worker is faster: chunks
that were begun too early are left out, or cut at the same document.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from efla_data.corpus.chunk import EVERY_HASH, ChunkResult, Encoder, Limits, chunk_prefix, encode_chunk, load_result
from efla_data.corpus.encode import TextEncoder
from efla_data.corpus.manifest import TokenizerInfo
from efla_data.corpus.pool import Report, WorkerPool
from efla_data.corpus.progress import Progress, Watcher
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.selection import Selection, select
from efla_data.corpus.sources import Piece
from efla_data.corpus.tokenizer import find_tokenizer

INFO, TOKENIZER = "tokenizer_info.json", "tokenizer"  # names in OUT.partial
WORKERS_LOCK = "workers.lock"  # there too: the next run waits for workers that outlive this one
MARGIN = 1.25  # a sample takes documents for this many times its budget, by estimate

Chunks = list[list[Piece]]
Show = Callable[[Progress], None]


def tokenise(
    folder: Path, recipe: Recipe, chunks: Chunks, processes: int, show: Show | None
) -> tuple[dict[int, ChunkResult], Selection | None]:
    """Encode what `folder` (OUT.partial) does not have yet. Returns the results that count, by chunk, and which of
    their documents stay (None: all)."""
    budget, goal, least = recipe.max_tokens, recipe.max_tokens, None
    while True:
        watched = None if recipe.sample == "documents" else goal
        watcher = Watcher([sum(piece.bytes for piece in chunk) for chunk in chunks], watched, show)
        if budget is None or goal is None:
            queue = Queue(folder, chunks, watcher)
        elif recipe.sample == "documents":
            queue = SampleQueue(folder, chunks, watcher, budget, least)
        else:
            queue = HeadQueue(folder, chunks, watcher, goal, cut=not recipe.deduplicate)
        _run(queue, recipe, processes)
        counted = queue.counted()
        results = {index: queue.results[index] for index in counted + queue.heldout}
        if not recipe.keeps_keys:
            return results, None
        selection = select(folder, recipe, counted, queue.heldout, results)
        missing = 0 if budget is None else budget - selection.train_tokens()
        if missing <= 0:
            return results, selection
        if isinstance(queue, HeadQueue):  # duplicates are gone: read on
            if queue.count == len(queue.training):
                return results, selection
            goal = queue.tokens + missing
        else:  # the estimate fell short: encode again, up to a higher hash
            bound = min(results[index].below for index in counted)
            if budget is None or bound == EVERY_HASH:
                return results, selection
            found = budget - missing
            least = min(EVERY_HASH, bound * 2 if not found else int(bound * max(1.2, 1.1 * budget / found)))


class Queue:
    """All chunks in order, held-out ones first: they are needed in any case, and usually small."""

    def __init__(self, folder: Path, chunks: Chunks, watcher: Watcher) -> None:
        self.folder, self.chunks, self.watcher = folder, chunks, watcher
        self.training = [index for index, chunk in enumerate(chunks) if not chunk[0].heldout]
        self.heldout = [index for index, chunk in enumerate(chunks) if chunk[0].heldout]
        self.results: dict[int, ChunkResult] = {}
        for index in range(len(chunks)):
            result = load_result(chunk_prefix(folder, index))
            if result is not None and self.usable(result):
                self.results[index] = result
                watcher.skip(index, result.train_tokens)
        self.waiting_heldout = deque(index for index in self.heldout if index not in self.results)
        self.waiting = deque(index for index in self.training if index not in self.results)

    def usable(self, result: ChunkResult) -> bool:
        """Whether the result of an earlier run holds enough of its chunk."""
        return True

    def limits(self) -> Limits:
        """How much of the next training chunk to take."""
        return Limits()

    def enough(self) -> bool:
        """Whether no further training chunk is needed."""
        return False

    def counted(self) -> list[int]:
        """The training chunks that belong to the corpus, when all work is done."""
        return self.training

    def next(self) -> tuple[int, Limits] | None:
        """The next chunk and how much of it; None when nothing is left to start."""
        if self.waiting_heldout:
            return self.waiting_heldout.popleft(), Limits()
        if self.enough():
            self.waiting.clear()
        return (self.waiting.popleft(), self.limits()) if self.waiting else None

    def done(self, index: int, result: ChunkResult) -> None:
        """Take in the result of a chunk."""
        self.results[index] = result
        self.watcher.finish(index, sum(shard.text_bytes for shard in result.shards.values()))


class HeadQueue(Queue):
    """Training chunks until, without a gap, they reach `goal` tokens. Only those count.

    cut: end inside a chunk, at the document that reaches the goal.
    """

    def __init__(self, folder: Path, chunks: Chunks, watcher: Watcher, goal: int, cut: bool) -> None:
        self.goal, self.cut = goal, cut
        self.count = self.tokens = 0
        super().__init__(folder, chunks, watcher)

    def limits(self) -> Limits:
        """No chunk is read beyond the goal, if it may be cut."""
        return Limits(self.goal if self.cut else None)

    def enough(self) -> bool:
        """Move `count` and `tokens` forward to the first gap, or to the goal."""
        while self.tokens < self.goal and self.count < len(self.training):
            result = self.results.get(self.training[self.count])
            if result is None:
                return False
            self.count, self.tokens = self.count + 1, self.tokens + result.train_tokens
        return True

    def counted(self) -> list[int]:
        """The chunks up to the goal."""
        self.enough()
        return self.training[: self.count]

    def next(self) -> tuple[int, Limits] | None:
        """At the end, the last chunk that counts comes once more if it was read beyond the goal: to cut it there."""
        request = super().next()
        if request is None and self.cut and self.enough() and self.tokens > self.goal and self.count > 1:
            last = self.training[self.count - 1]
            goal = self.goal - (self.tokens - self.results[last].train_tokens)
            self.cut = False
            return last, Limits(goal)
        return request


class SampleQueue(Queue):
    """All chunks, but of each training chunk only documents whose hash is below a bound that yields `goal` tokens.

    The bound falls as finished chunks show how many tokens a byte on disk yields. `least`: a bound that was found to be
    needed; results made with a lower one are made again.
    """

    def __init__(self, folder: Path, chunks: Chunks, watcher: Watcher, goal: int, least: int | None = None) -> None:
        self.goal, self.least = goal, least
        self.weights = [max(sum(piece.bytes for piece in chunk), 1) for chunk in chunks]
        super().__init__(folder, chunks, watcher)

    def usable(self, result: ChunkResult) -> bool:
        """Whether enough of the chunk was taken."""
        return self.least is None or result.below >= self.least

    def limits(self) -> Limits:
        """The first chunks whole, then as much as MARGIN times the goal should need."""
        if self.least is not None:
            return Limits(below=self.least)
        known = [(self.results[index], self.weights[index]) for index in self.training if index in self.results]
        seen = sum(result.below / EVERY_HASH * weight for result, weight in known)
        tokens = sum(result.train_tokens for result, _ in known)
        if not tokens:
            return Limits()
        total = tokens / seen * sum(self.weights[index] for index in self.training)
        return Limits(below=min(EVERY_HASH, int(MARGIN * self.goal / total * EVERY_HASH)))


def _run(queue: Queue, recipe: Recipe, processes: int) -> None:
    """Encode every chunk that the queue wants. The first error ends the run; finished chunks stay."""
    processes = max(1, min(processes, len(queue.waiting_heldout) + len(queue.waiting)))
    lock = queue.folder / WORKERS_LOCK
    with WorkerPool(processes, make_encoder, queue.folder, recipe, lock=lock) as pool:
        running: dict[Future[ChunkResult], int] = {}
        reported = (0, 0)
        while True:
            while len(running) < processes and (request := queue.next()) is not None:
                index, limits = request
                prefix = chunk_prefix(queue.folder, index)
                running[pool.submit(encode_chunk, queue.chunks[index], prefix, limits)] = index
            if not running:
                return
            for future in pool.finished(running):
                queue.done(running.pop(future), future.result())
            before, reported = reported, pool.totals
            queue.watcher.report(reported[0] - before[0], reported[1] - before[1])


def make_encoder(folder: Path, recipe: Recipe, report: Report) -> Encoder:
    """The state of a worker: the tokenizer kept in `folder`, and how to use it."""
    info = TokenizerInfo(**json.loads((folder / INFO).read_text(encoding="utf-8")))
    return Encoder(recipe, TextEncoder(find_tokenizer(str(folder / TOKENIZER)).backend, info), report)
