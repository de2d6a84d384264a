"""Windows: the numbered pieces of a corpus that loaders put into batches, T positions each.

Every kind of windows has a `context` T, a `count` W, a `fingerprint`, `order(rows)`, which says which window stands at
each place of the endless sequence of epochs, and `read(windows)`, which fetches some of them as `Rows`.

The concatenated stream, with N tokens:

    inputs  tokens[w T : w T + T]        targets  tokens[w T + 1 : w T + T + 1]        W = (N - 1) // T

Fewer than T tokens at the end belong to no window, unless `tail` asks for a last, short one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from efla_data.errors import DataError
from efla_data.loader.joined import Joined, count_below
from efla_data.loader.permutation import permute, round_keys
from efla_data.loader.token_file import TokenFile

IGNORE = -100


@dataclass(frozen=True)
class Rows:
    """Some windows: `inputs` and `targets` int64 [b, T], targets -100 where nothing is to be learnt.

    `ends` int64 [b, E] are the places in a row where its documents end, rising to T and repeating T: windows of whole
    documents have them, windows of the stream have None.
    """

    inputs: np.ndarray
    targets: np.ndarray
    ends: np.ndarray | None = None


class Windows(Protocol):
    """What a loader reads from."""

    context: int
    count: int
    fingerprint: str

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """Windows at places `rows` (int64, >= 0) of the sequence of epochs; seed None: as they lie."""
        ...

    def read(self, windows: np.ndarray) -> Rows:
        """Fetch windows (int64 [b], in any order; -1: a row without targets)."""
        ...


def epoch_order(rows: np.ndarray, count: int, seed: int | None, *labels: int) -> np.ndarray:
    """Windows at places `rows` when every epoch is all `count` windows once, in an order of its own.

    epoch = row // W,    window = permutation[seed, epoch, labels](row mod W)
    """
    epochs, windows = np.divmod(rows, count)
    if seed is not None:
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            windows[inside] = permute(windows[inside], count, round_keys("windows", seed, int(epoch), *labels))
    return windows


class StreamWindows:
    """Windows of the concatenated stream.

    mask_boundaries: target -100 where it would be the first token of the next document; the default trains on it, as
    the paper's stream does. tail: one more window for the targets that are left at the end, so that none is left out.
    """

    def __init__(self, token_file: TokenFile, context: int, mask_boundaries: bool = False, tail: bool = False) -> None:
        check_context(context)
        self.token_file, self.context, self.mask_boundaries = token_file, context, mask_boundaries
        targets = max(token_file.num_tokens - 1, 0)
        self.whole = targets // context  # windows with all T targets
        self.count = -(-targets // context) if tail else self.whole
        self.fingerprint = token_file.fingerprint
        if self.count < 1:
            least = (
                "at least 2 are needed to predict one" if tail else f"fewer than one window of context {context} + 1"
            )
            where = f"{token_file.folder} ({token_file.split})"
            raise DataError(
                f"{where}: {token_file.num_tokens} tokens, {least}: prepare more text or lower data.context"
            )

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """See `epoch_order`."""
        return epoch_order(rows, self.count, seed)

    def read(self, windows: np.ndarray) -> Rows:
        """Two gathers of whole rows, if it is a single shard; else row by row."""
        tokens, T = self.token_file.tokens, self.context
        if not isinstance(tokens, Joined) and ((windows >= 0) & (windows < self.whole)).all():
            inputs = tokens[: self.whole * T].reshape(self.whole, T)[windows].astype(np.int64)
            targets = tokens[1 : self.whole * T + 1].reshape(self.whole, T)[windows].astype(np.int64)
        else:
            inputs = np.zeros((len(windows), T), dtype=np.int64)
            targets = np.full((len(windows), T), IGNORE, dtype=np.int64)
            for row, window in enumerate(windows.tolist()):
                if window >= 0:
                    piece = tokens[window * T : window * T + T + 1]
                    inputs[row, : min(len(piece), T)] = piece[:T]
                    targets[row, : len(piece) - 1] = piece[1:]
        if self.mask_boundaries:
            _mask_document_starts(targets, self.token_file.document_ends, windows * T)
        return Rows(inputs, targets)


def _mask_document_starts(targets: np.ndarray, document_ends: np.ndarray | Joined, starts: np.ndarray) -> None:
    """Ignore target (row, t) where token starts[row] + t + 1 opens a document, i.e. is itself a document end."""
    low = count_below(document_ends, starts + 1, inclusive=False).tolist()
    high = count_below(document_ends, starts + targets.shape[1], inclusive=True).tolist()
    for row, start in enumerate(starts.tolist()):
        if start >= 0 and high[row] > low[row]:
            targets[row, document_ends[low[row] : high[row]].astype(np.int64) - 1 - start] = IGNORE


def check_context(context: int) -> None:
    """DataError for a window without positions."""
    if context < 1:
        raise DataError(f"data.context must be at least 1, got {context}")
