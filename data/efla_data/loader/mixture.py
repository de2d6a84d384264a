"""Sequences of several corpora, mixed by weight.

Weights are rounded to whole numbers q_i whose sum is M <= 10^6. Of every M consecutive rows, q_i belong to corpus i,
spread evenly: the rows are sorted by (k + 1/2) / q_i for the k-th row of corpus i. Row n therefore is

    block, place = divmod(n, M)        i = owner[place]        row of corpus i = block q_i + nth[place]

Each corpus has epochs of its own, each in an order of its own. Any row costs the same. Any run of rows holds each
corpus in its proportion, to within one or two sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from efla_data.errors import DataError
from efla_data.loader.sequences import Rows, Sequences, epoch_order

RESOLUTION = 10**6  # weights are kept to six digits


class MixedSequences:
    """The sequences of all `parts`, numbered end to end. DataError for weights that give no proportion."""

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[float]) -> None:
        self.parts, self.shares = list(parts), whole_shares(weights, len(parts))
        self.context = self.parts[0].context
        self.bounds = np.cumsum([0, *(part.count for part in self.parts)])  # first number of each part's sequences
        self.count = int(self.bounds[-1])
        self.fingerprint = " + ".join(
            f"{share}/{sum(self.shares)} {part.fingerprint}" for share, part in zip(self.shares, parts, strict=True)
        )
        self._owner, self._nth = _spread(self.shares)

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """Sequences at `rows`; each corpus counts its own epochs."""
        blocks, places = np.divmod(rows, len(self._owner))
        owners = self._owner[places]
        sequences = np.empty(len(rows), dtype=np.int64)
        for index, part in enumerate(self.parts):
            here = owners == index
            own = blocks[here] * self.shares[index] + self._nth[places[here]]
            sequences[here] = epoch_order(own, part.count, seed, index) + self.bounds[index]
        return sequences

    def read(self, sequences: np.ndarray) -> Rows:
        """Read each part's sequences and put them in their rows."""
        owners = np.maximum(np.searchsorted(self.bounds, sequences, side="right") - 1, 0)  # -1: any part will do
        read = []
        for index in np.unique(owners):
            here = owners == index
            own = np.where(sequences[here] < 0, -1, sequences[here] - self.bounds[index])
            read.append((here, self.parts[index].read(own)))
        if len(read) == 1:
            return read[0][1]
        some = read[0][1]
        inputs, targets = (np.empty((len(sequences), self.context), dtype=np.int64) for _ in range(2))
        ends = None if some.ends is None else np.empty((len(sequences), some.ends.shape[1]), dtype=np.int64)
        for here, some in read:
            inputs[here], targets[here] = some.inputs, some.targets
            if ends is not None:
                ends[here] = some.ends
        return Rows(inputs, targets, ends)


def whole_shares(weights: Sequence[float], count: int) -> list[int]:
    """Weights as whole numbers in the same proportion (to RESOLUTION), largest remainders first, reduced."""
    total = math.fsum(weights)
    usable = len(weights) == count and all(weight > 0 and math.isfinite(weight) for weight in weights)
    if not usable:
        raise DataError(f"data.weights: expected {count} numbers above 0, one for each of data.mixture, got {weights}")
    exact = [weight / total * RESOLUTION for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(count), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: RESOLUTION - sum(shares)]:
        shares[index] += 1
    if min(shares) == 0:
        raise DataError(f"data.weights: {weights} holds one below a {RESOLUTION:,}th of the sum, which is never drawn")
    factor = math.gcd(*shares)
    return [share // factor for share in shares]


def _spread(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each of M rows: its corpus, and how many earlier rows have the same corpus."""
    owner = np.repeat(np.arange(len(shares), dtype=np.uint16), shares)
    nth = np.concatenate([np.arange(share, dtype=np.int32) for share in shares])
    ideal = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    order = np.argsort(ideal, kind="stable")  # on a tie, the corpus named first comes first
    return owner[order], nth[order]
