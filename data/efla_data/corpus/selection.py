"""Choose the documents of the corpus: remove duplicates, take a sample of the whole, keep to the token budget.

`select` runs when all chunks are done. It reads the key of each document (`chunk.KEY_DTYPE`) in an order that depends
on the sources alone: held-out documents first, then training ones, each in the order of the chunks. So the result is
the same for any number of processes and after any interruption, and no text is both held out and trained on.

    duplicates   the first of documents with equal hashes (128 bits) stays
    sample       documents whose hash (64 bits) is at most c; c is the smallest hash with which training reaches its
                 budget. Documents held out by their hash are sampled too; held-out sources are not
    head         training documents up to the one that reaches the budget, held-out ones of the chunks up to it

Memory: one bucket of hashes (a million or two) and one chunk's documents. A file holds a byte for each document.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from efla_data.corpus.chunk import KEY_DTYPE, ChunkResult, chunk_prefix
from efla_data.corpus.recipe import Recipe
from efla_data.loader.token_file import INDEX_DTYPE

Part = tuple[int, str]  # (chunk, split)
DROPPED, KEPT, DUPLICATE = 0, 1, 2
BUCKET = 1 << 20  # documents in one bucket of hashes, about
MOST_BUCKETS = 1 << 9
RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])
BIN_BITS = 16  # bins of hashes in which the tokens of a sample are counted


class Selection:
    """Which documents of all chunks stay. A part is one split of one chunk."""

    def __init__(self, folder: Path, parts: list[Part], results: dict[int, ChunkResult]) -> None:
        self.work = folder / "selection"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self._folder, self.parts = folder, parts
        self._counts = {part: results[part[0]].shards[part[1]].documents for part in parts}
        self._first, total = {}, 0
        for part in parts:
            self._first[part] = total
            total += self._counts[part]
        self.documents = total
        with open(self.work / "keep.bin", "wb") as handle:  # write all bytes: a full disk fails here, not in the map
            for first in range(0, max(total, 1), BUCKET):
                handle.write(bytes([KEPT]) * min(BUCKET, max(total, 1) - first))
        self._keep = np.memmap(self.work / "keep.bin", dtype=np.uint8, mode="r+")

    def mask(self, part: Part) -> np.ndarray:
        """bool [documents of the part]: True for those that stay."""
        first = self._first[part]
        return self._keep[first : first + self._counts[part]] == KEPT

    def keys(self, part: Part) -> np.ndarray:
        """KEY_DTYPE [documents of the part]."""
        return np.fromfile(f"{chunk_prefix(self._folder, part[0])}.{part[1]}.key", dtype=KEY_DTYPE)

    def lengths(self, part: Part) -> np.ndarray:
        """Tokens of each document of the part, int64."""
        ends = np.fromfile(f"{chunk_prefix(self._folder, part[0])}.{part[1]}.idx", dtype=INDEX_DTYPE)
        return np.diff(ends.astype(np.int64), prepend=0)

    def drop(self, part: Part, which: np.ndarray) -> None:
        """Drop the documents `which` (bool) to keep to the budget, duplicates included."""
        first = self._first[part]
        self._keep[first : first + len(which)][which] = DROPPED

    def drop_duplicates(self, numbers: np.ndarray) -> None:
        """Drop documents by their numbers in the order of all parts."""
        self._keep[numbers] = DUPLICATE

    def duplicates(self) -> int:
        """Number of documents dropped as duplicates alone."""
        return sum(
            int(np.count_nonzero(self._keep[first : first + BUCKET] == DUPLICATE))
            for first in range(0, self.documents, BUCKET)
        )

    def train_tokens(self) -> int:
        """Number of training tokens that stay."""
        return sum(int(self.lengths(part)[self.mask(part)].sum()) for part in self.parts if part[1] == "train")


def select(
    folder: Path, recipe: Recipe, training: list[int], heldout: list[int], results: dict[int, ChunkResult]
) -> Selection:
    """Choose among the documents of the finished chunks `training` and `heldout`, each in order."""
    parts = [(chunk, "heldout") for chunk in heldout + training] + [(chunk, "train") for chunk in training]
    selection = Selection(folder, parts, results)
    if recipe.deduplicate:
        _drop_duplicates(selection)
    if recipe.sample == "documents":
        assert recipe.max_tokens is not None
        least = min(results[chunk].below for chunk in training)  # below this hash every chunk has all its documents
        sampled = [part for part in parts if part[0] in set(training)]
        for part in sampled:
            selection.drop(part, selection.keys(part)["high"] > least - 1)
        bound = _sample_bound(training, selection, recipe.max_tokens)
        for part in sampled:
            selection.drop(part, selection.keys(part)["high"] > bound)
    elif recipe.max_tokens is not None:
        _drop_after(training, selection, recipe.max_tokens)
    return selection


def _drop_after(training: list[int], selection: Selection, left: int) -> None:
    """Keep training documents up to the one that reaches `left` tokens, and nothing of later chunks."""
    for chunk in training:
        lengths = selection.lengths((chunk, "train")) * selection.mask((chunk, "train"))
        if left <= 0:
            selection.drop((chunk, "heldout"), np.ones(len(selection.mask((chunk, "heldout"))), dtype=bool))
        selection.drop((chunk, "train"), np.cumsum(lengths) - lengths >= left)
        left -= int(lengths.sum())


def _drop_duplicates(selection: Selection) -> None:
    """Distribute hashes to files by their first bits, then sort each file."""
    bits = min(max(selection.documents // BUCKET, 1), MOST_BUCKETS).bit_length() - 1
    paths = [selection.work / f"{bucket}.bin" for bucket in range(1 << bits)]
    number = 0
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(open(path, "wb")) for path in paths]
        for part in selection.parts:
            keys = selection.keys(part)
            records = np.empty(len(keys), dtype=RECORD)
            records["high"], records["low"] = keys["high"], keys["low"]
            records["number"] = number + np.arange(len(keys))
            number += len(keys)
            buckets = (keys["high"] >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(keys), np.int64)
            order = np.argsort(buckets, kind="stable")
            edges = np.searchsorted(buckets[order], np.arange(len(paths) + 1))
            for bucket, handle in enumerate(handles):
                handle.write(records[order[edges[bucket] : edges[bucket + 1]]].tobytes())
    for path in paths:
        records = np.fromfile(path, dtype=RECORD)
        records = records[np.lexsort((records["number"], records["low"], records["high"]))]
        same = (records["high"][1:] == records["high"][:-1]) & (records["low"][1:] == records["low"][:-1])
        selection.drop_duplicates(records["number"][1:][same].astype(np.int64))
        path.unlink()


def _sample_bound(training: list[int], selection: Selection, budget: int) -> int:
    """The smallest hash c such that training documents with hashes up to c have `budget` tokens; the largest hash if
    all together have fewer. Counts by bins of hashes first, then by document inside the bin that reaches the budget."""

    def documents() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for part in ((chunk, "train") for chunk in training):
            mask = selection.mask(part)
            high = selection.keys(part)["high"][mask]
            yield high, (high >> np.uint64(64 - BIN_BITS)).astype(np.int64), selection.lengths(part)[mask]

    bins = np.zeros(1 << BIN_BITS, dtype=np.int64)
    for _, places, lengths in documents():
        np.add.at(bins, places, lengths)
    totals = np.cumsum(bins)
    if totals[-1] < budget:
        return (1 << 64) - 1
    chosen = int(np.searchsorted(totals, budget))
    inside = [(high[places == chosen], lengths[places == chosen]) for high, places, lengths in documents()]
    high, lengths = (np.concatenate(column) for column in zip(*inside, strict=True))
    order = np.argsort(high, kind="stable")
    reached = totals[chosen] - bins[chosen] + np.cumsum(lengths[order])
    return int(high[order][np.searchsorted(reached, budget)])
