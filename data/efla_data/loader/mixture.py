"""Windows of several corpora by weight.

Weights are rounded to whole numbers q_i that add up to M <= 10^6. Of every M places in a row, q_i belong to corpus i,
spread evenly: its k-th one stands where (k + 1/2) / q_i comes in the order of all. Place n therefore is

    block, place = divmod(n, M)        i = owner[place]        s = block q_i + nth[place]

and holds the window at place s of the sequence of epochs of corpus i, each in an order of its own. Any place costs the
same; any stretch of places has each corpus in its proportion within one or two windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from efla_data.errors import DataError
from efla_data.loader.sequences import Rows, Windows, epoch_order

PLACES = 10**6  # weights are kept to six digits


class MixedWindows:
    """Windows of all `parts`, numbered end to end. DataError for weights that are no proportion."""

    def __init__(self, parts: Sequence[Windows], weights: Sequence[float]) -> None:
        self.parts, self.shares = list(parts), whole_shares(weights, len(parts))
        self.context = self.parts[0].context
        self.bounds = np.cumsum([0, *(part.count for part in self.parts)])  # numbers of each part's windows
        self.count = int(self.bounds[-1])
        self.fingerprint = " + ".join(
            f"{share}/{sum(self.shares)} {part.fingerprint}" for share, part in zip(self.shares, parts, strict=True)
        )
        self._owner, self._nth = _places(self.shares)

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """Windows at places `rows`; an epoch is counted for each corpus by itself."""
        blocks, places = np.divmod(rows, len(self._owner))
        owners = self._owner[places]
        windows = np.empty(len(rows), dtype=np.int64)
        for index, part in enumerate(self.parts):
            here = owners == index
            own = blocks[here] * self.shares[index] + self._nth[places[here]]
            windows[here] = epoch_order(own, part.count, seed, index) + self.bounds[index]
        return windows

    def read(self, windows: np.ndarray) -> Rows:
        """Fetch each part's windows and put them in their rows."""
        owners = np.searchsorted(self.bounds, windows, side="right") - 1
        owners = np.maximum(owners, 0)  # rows without a window: whichever part
        pieces = [(owners == index, index) for index in np.unique(owners)]
        read = []
        for here, index in pieces:
            wanted = windows[here]
            read.append((here, self.parts[index].read(np.where(wanted < 0, -1, wanted - self.bounds[index]))))
        if len(read) == 1:
            return read[0][1]
        some = read[0][1]
        inputs, targets = (np.empty((len(windows), self.context), dtype=np.int64) for _ in range(2))
        ends = None if some.ends is None else np.empty((len(windows), some.ends.shape[1]), dtype=np.int64)
        for here, some in read:
            inputs[here], targets[here] = some.inputs, some.targets
            if ends is not None:
                ends[here] = some.ends
        return Rows(inputs, targets, ends)


def whole_shares(weights: Sequence[float], count: int) -> list[int]:
    """Weights as whole numbers in the same proportion (to PLACES), largest remainders first, reduced."""
    total = math.fsum(weights)
    usable = len(weights) == count and all(weight > 0 and math.isfinite(weight) for weight in weights)
    if not usable:
        raise DataError(f"data.weights: expected {count} numbers above 0, one for each of data.mixture, got {weights}")
    exact = [weight / total * PLACES for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(count), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: PLACES - sum(shares)]:
        shares[index] += 1
    if min(shares) == 0:
        raise DataError(f"data.weights: {weights} holds one below a {PLACES:,}th of the sum, which is never drawn")
    factor = math.gcd(*shares)
    return [share // factor for share in shares]


def _places(shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each of M places the corpus and how many places before it are of the same one."""
    owner = np.repeat(np.arange(len(shares), dtype=np.uint16), shares)
    nth = np.concatenate([np.arange(share, dtype=np.int32) for share in shares])
    ideal = np.concatenate([(np.arange(share) + 0.5) / share for share in shares])
    order = np.argsort(ideal, kind="stable")  # ties: the corpus named first
    return owner[order], nth[order]
