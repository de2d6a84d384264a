"""Sequences: the numbered samples of a corpus that loaders put into batches, T = `context` positions each.

Every kind of sequences has a `context` T, a `count` W, a `fingerprint`, `order(rows)`, which gives the sequence at each
row of the endless series of epochs, and `read(ids)`, which reads some of them as `Rows`.

Sequence s of the concatenated stream of N tokens:

    inputs  tokens[s T : s T + T]        targets  tokens[s T + 1 : s T + T + 1]        W = (N - 1) // T

The last tokens, fewer than T, belong to no sequence unless `tail` asks for a last, short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from efla_data.errors import DataError
from efla_data.loader.concatenated import ConcatenatedArray, count_below
from efla_data.loader.permutation import permute, round_keys
from efla_data.loader.token_file import TokenFile

IGNORE = -100


@dataclass(frozen=True)
class Rows:
    """Some sequences: `inputs` and `targets` int64 [b, T]; targets are -100 where the loss ignores them.

    `ends` int64 [b, E]: the places in a row where its documents end, rising to T and repeating T. Sequences of whole
    documents have them; sequences of the stream have None.
    """

    inputs: np.ndarray
    targets: np.ndarray
    ends: np.ndarray | None = None


class Sequences(Protocol):
    """What a loader reads from."""

    context: int
    count: int
    fingerprint: str

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """Sequences at `rows` (int64, >= 0) of the series of epochs. seed None: unshuffled."""
        ...

    def read(self, sequences: np.ndarray) -> Rows:
        """Read sequences (int64 [b], in any order; -1 gives a row without targets)."""
        ...


def epoch_order(rows: np.ndarray, count: int, seed: int | None, *labels: int) -> np.ndarray:
    """Sequences at `rows` when every epoch reads all `count` sequences once, in an order of its own.

    epoch = row // W,    sequence = permutation[seed, epoch, labels](row mod W)
    """
    epochs, sequences = np.divmod(rows, count)
    if seed is not None:
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            # The label "windows" is part of the keys: another word would change the order of all runs.
            sequences[inside] = permute(sequences[inside], count, round_keys("windows", seed, int(epoch), *labels))
    return sequences


class StreamSequences:
    """Sequences of the concatenated stream.

    mask_boundaries: ignore the target that is the first token of the next document; the default trains on it, as the
    paper's stream does. tail: add one sequence for the targets left at the end, so that all are covered. DataError if
    the stream holds no sequence.
    """

    def __init__(self, token_file: TokenFile, context: int, mask_boundaries: bool = False, tail: bool = False) -> None:
        check_context(context)
        self.token_file, self.context, self.mask_boundaries = token_file, context, mask_boundaries
        targets = max(token_file.num_tokens - 1, 0)
        self.whole = targets // context  # sequences with all T targets
        self.count = -(-targets // context) if tail else self.whole
        self.fingerprint = token_file.fingerprint
        if self.count < 1:
            least = (
                "at least 2 are needed to predict one" if tail else f"fewer than one sequence of context {context} + 1"
            )
            where = f"{token_file.folder} ({token_file.split})"
            raise DataError(
                f"{where}: {token_file.num_tokens} tokens, {least}: prepare more text or lower data.context"
            )

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """See `epoch_order`."""
        return epoch_order(rows, self.count, seed)

    def read(self, sequences: np.ndarray) -> Rows:
        """Gather whole rows twice if the split is a single shard, else copy row by row."""
        tokens, T = self.token_file.tokens, self.context
        if not isinstance(tokens, ConcatenatedArray) and ((sequences >= 0) & (sequences < self.whole)).all():
            inputs = tokens[: self.whole * T].reshape(self.whole, T)[sequences].astype(np.int64)
            targets = tokens[1 : self.whole * T + 1].reshape(self.whole, T)[sequences].astype(np.int64)
        else:
            inputs = np.zeros((len(sequences), T), dtype=np.int64)
            targets = np.full((len(sequences), T), IGNORE, dtype=np.int64)
            for row, sequence in enumerate(sequences.tolist()):
                if sequence >= 0:
                    ids = tokens[sequence * T : sequence * T + T + 1]
                    inputs[row, : min(len(ids), T)] = ids[:T]
                    targets[row, : len(ids) - 1] = ids[1:]
        for row in _rows_beyond(inputs, targets, self.token_file.vocab_size):
            self.token_file.check_ids(np.maximum(inputs[row], targets[row]), int(sequences[row]) * T)
        if self.mask_boundaries:
            _mask_document_starts(targets, self.token_file, sequences * T)
        return Rows(inputs, targets)


def _rows_beyond(inputs: np.ndarray, targets: np.ndarray, vocab_size: int) -> list[int]:
    """The rows that hold an id which is not in the vocabulary: none, unless the file is damaged."""
    if max(inputs.max(initial=0), targets.max(initial=0)) < vocab_size:
        return []
    beyond = np.maximum(inputs, targets).max(axis=1) >= vocab_size
    return np.flatnonzero(beyond).tolist()


def _mask_document_starts(targets: np.ndarray, token_file: TokenFile, starts: np.ndarray) -> None:
    """Ignore target (row, t) where token starts[row] + t + 1 opens a document, i.e. is a document end."""
    document_ends = token_file.document_ends
    low = count_below(document_ends, starts + 1, inclusive=False).tolist()
    high = count_below(document_ends, starts + targets.shape[1], inclusive=True).tolist()
    for row, start in enumerate(starts.tolist()):
        if start >= 0 and high[row] > low[row]:
            places = document_ends[low[row] : high[row]].astype(np.int64) - 1 - start
            if places.min() < 0 or places.max() >= targets.shape[1]:
                raise token_file.damaged_index(f"document ends near token {start} do not rise")
            targets[row, places] = IGNORE


def check_context(context: int) -> None:
    """DataError for a sequence without positions."""
    if context < 1:
        raise DataError(f"data.context must be at least 1, got {context}")
