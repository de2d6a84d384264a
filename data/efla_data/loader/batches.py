"""Batches as pure functions of (data, seed, step, micro-batch, rank layout).

With W windows (`efla_data.loader.sequences` says of what), G = global batch, b = micro batch, R ranks:

    global row j:  n = step G + j,   epoch = n // W,   w = permutation[seed, epoch](n mod W)
    placement:     j = (micro R + rank) b + i,   row i of micro-batch `micro` on `rank`

So an epoch is every window once, in an order of its own; a step's G windows do not depend on how they are spread over
ranks and micro-batches; and going to any step costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from efla_data.errors import DataError
from efla_data.loader.sequences import IGNORE, Rows, Windows

__all__ = ["IGNORE", "Batch", "SequentialLoader", "WindowLoader"]

BLOCK = 2048  # global rows permuted at a time, at most


@dataclass(frozen=True)
class Batch:
    """`targets` are the aligned next tokens, -100 where nothing is to be learnt; padding rows have window id -1.

    Windows of whole documents stand end to end in one row (b' = 1, T' = b T) with `cu_seqlens`, the offsets 0 ... T' of
    its documents. Their number is the same in every batch: documents without tokens fill it up. Windows of the stream
    are one row each (b' = b, T' = T), and `cu_seqlens` is None.
    """

    input_ids: torch.Tensor  # [b', T'] int64
    targets: torch.Tensor  # [b', T'] int64
    window_ids: torch.Tensor  # [b] int64
    cu_seqlens: torch.Tensor | None = None  # [b E + 1] int32, on the CPU


class WindowLoader:
    """Training batches: `batch(step, micro)` for any step and micro-batch, in any order.

    `global_batch` and `micro_batch` count windows; `micro_steps` = global_batch / (micro_batch world_size)
    must be whole. `shuffle=False` reads the windows in order.
    """

    def __init__(
        self,
        windows: Windows,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        _check_layout(micro_batch, rank, world_size)
        per_step = micro_batch * world_size
        if global_batch < 1 or global_batch % per_step:
            raise DataError(
                f"global batch of {global_batch} windows is not a multiple of micro_batch {micro_batch} x {world_size} "
                f"processes = {per_step}: change train.batch_tokens, train.micro_batch or the number of processes"
            )
        self.windows, self.seed = windows, seed if shuffle else None
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.rank, self.world_size = rank, world_size
        self.micro_steps = global_batch // per_step
        self._block_rows = min(BLOCK, 4 * windows.count)  # few epochs each
        self._kept: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def window_ids(self, step: int, micro: int) -> np.ndarray:
        """Windows of one micro-batch on this rank, int64 [b]."""
        if step < 0 or not 0 <= micro < self.micro_steps:
            raise ValueError(f"expected step >= 0 and 0 <= micro < {self.micro_steps}, got step {step}, micro {micro}")
        first = (micro * self.world_size + self.rank) * self.micro_batch
        first += step * self.global_batch
        return self._rows(first, first + self.micro_batch)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Windows of the global rows start..stop-1, int64."""
        size = self._block_rows
        blocks = range(start // size, (stop - 1) // size + 1)
        windows = np.concatenate([self._block(block) for block in blocks])
        return windows[start - blocks.start * size : stop - blocks.start * size]

    def _block(self, block: int) -> np.ndarray:
        """Windows of one block of global rows. The last one is kept: many rows cost little more than few."""
        if block != self._kept[0]:
            rows = np.arange(self._block_rows, dtype=np.int64) + block * self._block_rows
            self._kept = block, self.windows.order(rows, self.seed)
        return self._kept[1]

    def batch(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of `step` for this rank."""
        window_ids = self.window_ids(step, micro)
        return _make_batch(self.windows.read(window_ids), window_ids)


class SequentialLoader:
    """Validation batches: every window exactly once over all batches and ranks, in order.

    All ranks have the same `num_batches`, so none waits for another; rows past the end hold only -100.
    """

    def __init__(self, windows: Windows, micro_batch: int, rank: int = 0, world_size: int = 1) -> None:
        _check_layout(micro_batch, rank, world_size)
        self.windows, self.micro_batch, self.rank, self.world_size = windows, micro_batch, rank, world_size
        self.num_windows = windows.count
        self.num_batches = -(-self.num_windows // (micro_batch * world_size))

    def batch(self, index: int) -> Batch:
        """Batch `index` of 0..num_batches-1 for this rank."""
        if not 0 <= index < self.num_batches:
            raise ValueError(f"expected 0 <= index < {self.num_batches}, got {index}")
        first = (index * self.world_size + self.rank) * self.micro_batch
        window_ids = first + np.arange(self.micro_batch, dtype=np.int64)
        window_ids[window_ids >= self.num_windows] = -1
        return _make_batch(self.windows.read(window_ids), window_ids)


def _make_batch(rows: Rows, window_ids: np.ndarray) -> Batch:
    inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
    if rows.ends is None:
        return Batch(inputs, targets, torch.from_numpy(window_ids))
    count, T = rows.inputs.shape
    ends = rows.ends + T * np.arange(count)[:, None]
    offsets = torch.from_numpy(np.concatenate([[0], ends.ravel()]).astype(np.int32))
    return Batch(inputs.view(1, -1), targets.view(1, -1), torch.from_numpy(window_ids), offsets)


def _check_layout(micro_batch: int, rank: int, world_size: int) -> None:
    if micro_batch < 1:
        raise DataError(f"train.micro_batch must be at least 1, got {micro_batch}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected 0 <= rank < world_size, got rank {rank} of {world_size}")
