"""Several arrays end to end, read as one: the shards of a split, each a memory map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Joined:
    """`parts` [n_1], [n_2], ... of one dtype as one array [n_1 + n_2 + ...] for reading; nothing is loaded.

    A slice that lies in one part is a view of it, any other a copy. `offsets[i]` is added to the values of part i:
    document ends count from the start of their own shard.
    """

    def __init__(self, parts: Sequence[np.ndarray], offsets: Sequence[int] | None = None) -> None:
        self.parts = list(parts)
        self.offsets = None if offsets is None else [int(offset) for offset in offsets]
        self.dtype = self.parts[0].dtype
        self.bounds = [0]
        for part in self.parts:
            self.bounds.append(self.bounds[-1] + len(part))

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getitem__(self, key: slice) -> np.ndarray:
        """Elements start..stop-1 of a slice without a step."""
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError(f"expected a slice without a step, got {key}")
        pieces = []
        for index, part in enumerate(self.parts):
            low = self.bounds[index]
            if start < low + len(part) and stop > low:
                piece = part[max(start - low, 0) : stop - low]
                pieces.append(piece if self.offsets is None else piece + self.dtype.type(self.offsets[index]))
        if not pieces:
            return np.empty(0, self.dtype)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def tolist(self) -> list[int]:
        """All elements as Python numbers, for small arrays."""
        return self[:].tolist()


def count_below(rising: np.ndarray | Joined, values: np.ndarray, inclusive: bool) -> np.ndarray:
    """How many elements of `rising` (all positive) are < or, inclusive, <= each of `values` (int64 [n]); int64 [n]."""
    if isinstance(rising, Joined):
        parts, offsets = rising.parts, rising.offsets or [0] * len(rising.parts)
    else:
        parts, offsets = [rising], [0]
    counts = np.zeros(len(values), dtype=np.int64)
    for part, offset in zip(parts, offsets, strict=True):
        # of the same dtype as the elements: a search among other types would copy the whole map
        wanted = np.maximum(values - offset, 0).astype(part.dtype)
        counts += np.searchsorted(part, wanted, side="right" if inclusive else "left")
    return counts
