"""Several arrays read as one: the shards of a split, each a memory map."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class ConcatenatedArray:
    """`parts` [n_1], [n_2], ... of one dtype read as one array [n_1 + n_2 + ...]. Nothing is loaded on creation.

    A slice inside one part is a view; any other slice is a copy. `offsets[i]` is added to the values of part i, because
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
        """Elements start..stop-1. ValueError for a slice with a step."""
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


def count_below(rising: np.ndarray | ConcatenatedArray, values: np.ndarray, inclusive: bool) -> np.ndarray:
    """How many elements of `rising` (sorted, positive) are < each of `values` (<= if inclusive); int64 [n]."""
    if isinstance(rising, ConcatenatedArray):
        parts, offsets = rising.parts, rising.offsets or [0] * len(rising.parts)
    else:
        parts, offsets = [rising], [0]
    counts = np.zeros(len(values), dtype=np.int64)
    for part, offset in zip(parts, offsets, strict=True):
        # searchsorted copies the whole memory map if the dtypes differ
        wanted = np.maximum(values - offset, 0).astype(part.dtype)
        counts += np.searchsorted(part, wanted, side="right" if inclusive else "left")
    return counts
