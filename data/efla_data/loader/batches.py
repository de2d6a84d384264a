"""A batch is a pure function of (data, seed, step, micro-batch, rank layout).

With W sequences of T tokens (see `efla_data.loader.sequences`), global batch G, micro-batch b, R ranks:

    global row j:  n = step G + j,   epoch = n // W,   s = permutation[seed, epoch](n mod W)
    placement:     j = (micro R + rank) b + i,   row i of micro-batch `micro` on `rank`

Every epoch reads each sequence once, in an order of its own. The G sequences of a step are the same for any number of
ranks and any micro-batch. Seeking to a step costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from efla_data.errors import DataError
from efla_data.loader.sequences import IGNORE, Rows, Sequences

__all__ = ["IGNORE", "Batch", "TrainLoader", "ValidationLoader"]

BLOCK = 2048  # largest number of global rows that one call permutes


@dataclass(frozen=True)
class Batch:
    """`targets` are the next tokens, -100 where the loss ignores them. Padding rows have sequence id -1.

    The stream gives one sequence per row (b' = b, T' = T), and `cu_seqlens` is None. Packed documents stand end to end
    in a single row (b' = 1, T' = b T); `cu_seqlens` holds the offsets 0 ... T' of the documents. Empty documents fill
    it up, so that its length is the same in every batch.
    """

    input_ids: torch.Tensor  # [b', T'] int64
    targets: torch.Tensor  # [b', T'] int64
    sequence_ids: torch.Tensor  # [b] int64
    cu_seqlens: torch.Tensor | None = None  # [b E + 1] int32, on the CPU


class TrainLoader:
    """Training batches: `batch(step, micro)` for any step and micro-batch, in any order.

    `global_batch` and `micro_batch` count sequences. `micro_steps` = global_batch / (micro_batch world_size) must be a
    whole number, else DataError. `shuffle=False` reads the sequences in order.
    """

    def __init__(
        self,
        sequences: Sequences,
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
                f"global batch of {global_batch} sequences is not a multiple of micro_batch {micro_batch} x "
                f"{world_size} processes = {per_step}: change train.batch_tokens, train.micro_batch or the number of "
                "processes"
            )
        self.sequences, self.seed = sequences, seed if shuffle else None
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.rank, self.world_size = rank, world_size
        self.micro_steps = global_batch // per_step
        self._block_rows = min(BLOCK, 4 * sequences.count)  # a block spans few epochs
        self._cached: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def sequence_ids(self, step: int, micro: int) -> np.ndarray:
        """Ids of the sequences of one micro-batch on this rank, int64 [b]. ValueError for a place out of range."""
        if step < 0 or not 0 <= micro < self.micro_steps:
            raise ValueError(f"expected step >= 0 and 0 <= micro < {self.micro_steps}, got step {step}, micro {micro}")
        first = step * self.global_batch + (micro * self.world_size + self.rank) * self.micro_batch
        return self._rows(first, first + self.micro_batch)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        """Sequence ids of the global rows start..stop-1, int64."""
        size = self._block_rows
        blocks = range(start // size, (stop - 1) // size + 1)
        ids = np.concatenate([self._block(block) for block in blocks])
        return ids[start - blocks.start * size : stop - blocks.start * size]

    def _block(self, block: int) -> np.ndarray:
        """Sequence ids of one block of global rows. The last block is cached: permuting many rows costs little more
        than permuting few."""
        if block != self._cached[0]:
            rows = np.arange(self._block_rows, dtype=np.int64) + block * self._block_rows
            self._cached = block, self.sequences.order(rows, self.seed)
        return self._cached[1]

    def batch(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of `step` for this rank. DataError naming step and file where the data are damaged."""
        ids = self.sequence_ids(step, micro)
        try:
            return _make_batch(self.sequences.read(ids), ids)
        except DataError as error:
            raise DataError(f"batch of step {step}: {error}") from None


class ValidationLoader:
    """Validation batches: every sequence exactly once over all batches and ranks, in order.

    All ranks have the same `num_batches`, so that no rank waits for another. Rows past the end have only ignored
    targets.
    """

    def __init__(self, sequences: Sequences, micro_batch: int, rank: int = 0, world_size: int = 1) -> None:
        _check_layout(micro_batch, rank, world_size)
        self.sequences, self.micro_batch, self.rank, self.world_size = sequences, micro_batch, rank, world_size
        self.num_sequences = sequences.count
        self.num_batches = -(-self.num_sequences // (micro_batch * world_size))

    def batch(self, index: int) -> Batch:
        """Batch `index` of 0..num_batches-1 for this rank."""
        if not 0 <= index < self.num_batches:
            raise ValueError(f"expected 0 <= index < {self.num_batches}, got {index}")
        first = (index * self.world_size + self.rank) * self.micro_batch
        ids = first + np.arange(self.micro_batch, dtype=np.int64)
        ids[ids >= self.num_sequences] = -1
        return _make_batch(self.sequences.read(ids), ids)


def _make_batch(rows: Rows, ids: np.ndarray) -> Batch:
    inputs, targets = torch.from_numpy(rows.inputs), torch.from_numpy(rows.targets)
    if rows.ends is None:
        return Batch(inputs, targets, torch.from_numpy(ids))
    count, T = rows.inputs.shape
    ends = rows.ends + T * np.arange(count)[:, None]
    offsets = torch.from_numpy(np.concatenate([[0], ends.ravel()]).astype(np.int32))
    return Batch(inputs.view(1, -1), targets.view(1, -1), torch.from_numpy(ids), offsets)


def _check_layout(micro_batch: int, rank: int, world_size: int) -> None:
    if micro_batch < 1:
        raise DataError(f"train.micro_batch must be at least 1, got {micro_batch}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected 0 <= rank < world_size, got rank {rank} of {world_size}")
