"""Batches as pure functions of (data, seed, step, micro-batch, rank layout).

With T = context, N tokens, G = global batch, b = micro batch, R ranks, W = (N - 1) // T windows per epoch:

    window w:      inputs  tokens[w T : w T + T],   targets  tokens[w T + 1 : w T + T + 1]
    global row j:  n = step G + j,   epoch = n // W,   w = permutation[seed, epoch](n mod W)
    placement:     j = (micro R + rank) b + i,   row i of micro-batch `micro` on `rank`

So an epoch is every window once, in an order of its own; a step's G windows do not depend on how they are spread over
ranks and micro-batches; and going to any step costs nothing. Fewer than T tokens at the end belong to no window.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from efla_data.errors import DataError
from efla_data.permutation import permute, round_keys
from efla_data.token_file import INDEX_DTYPE, TokenFile

IGNORE = -100
BLOCK = 2048  # global rows permuted at a time, at most


@dataclass(frozen=True)
class Batch:
    """`targets` are the aligned next tokens, -100 where nothing is to be learnt; padding rows have window id -1."""

    input_ids: torch.Tensor  # [b, T] int64
    targets: torch.Tensor  # [b, T] int64
    window_ids: torch.Tensor  # [b] int64


class WindowLoader:
    """Training batches: `batch(step, micro)` for any step and micro-batch, in any order.

    `global_batch` and `micro_batch` count windows; `micro_steps` = global_batch / (micro_batch world_size)
    must be whole.
    `shuffle=False` reads the stream in order. `mask_boundaries=True` sets the target -100 where it would be the first
    token of the next document; the default trains on it, as the paper's concatenated stream does.
    """

    def __init__(
        self,
        token_file: TokenFile,
        context: int,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        mask_boundaries: bool = False,
        shuffle: bool = True,
    ) -> None:
        _check_layout(context, micro_batch, rank, world_size)
        per_step = micro_batch * world_size
        if global_batch < 1 or global_batch % per_step:
            raise DataError(
                f"global batch of {global_batch} windows is not a multiple of micro_batch {micro_batch} x {world_size} "
                f"processes = {per_step}: change train.batch_tokens, train.micro_batch or the number of processes"
            )
        self.windows_per_epoch = (token_file.num_tokens - 1) // context
        if self.windows_per_epoch < 1:
            raise DataError(
                f"{token_file.folder} ({token_file.split}): {token_file.num_tokens} tokens are fewer than one window "
                f"of context {context} + 1: prepare more text or lower data.context"
            )
        self.token_file, self.context, self.seed = token_file, context, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.rank, self.world_size = rank, world_size
        self.mask_boundaries, self.shuffle = mask_boundaries, shuffle
        self.micro_steps = global_batch // per_step
        self._block_rows = min(BLOCK, 4 * self.windows_per_epoch)  # few epochs each
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
            size = self._block_rows
            epochs, windows = np.divmod(np.arange(size) + block * size, self.windows_per_epoch)
            if self.shuffle:
                for epoch in np.unique(epochs):
                    inside = epochs == epoch
                    keys = round_keys("windows", self.seed, int(epoch))
                    windows[inside] = permute(windows[inside], self.windows_per_epoch, keys)
            self._kept = block, windows
        return self._kept[1]

    def batch(self, step: int, micro: int) -> Batch:
        """Micro-batch `micro` of `step` for this rank."""
        windows = self.window_ids(step, micro)
        return gather(self.token_file, windows, self.context, self.mask_boundaries)


class SequentialLoader:
    """Validation batches: every target of the stream, tokens 1..N-1, exactly once over all batches and ranks, in order.

    The last window may be short: its rest has target -100. All ranks have the same `num_batches`, so none waits for
    another; rows past the end hold only -100.
    """

    def __init__(
        self,
        token_file: TokenFile,
        context: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        mask_boundaries: bool = False,
    ) -> None:
        _check_layout(context, micro_batch, rank, world_size)
        if token_file.num_tokens < 2:
            where = f"{token_file.folder} ({token_file.split})"
            raise DataError(f"{where}: {token_file.num_tokens} tokens, at least 2 are needed to predict one")
        self.token_file, self.context, self.micro_batch = token_file, context, micro_batch
        self.rank, self.world_size, self.mask_boundaries = rank, world_size, mask_boundaries
        self.num_windows = -(-(token_file.num_tokens - 1) // context)
        self.num_batches = -(-self.num_windows // (micro_batch * world_size))

    def batch(self, index: int) -> Batch:
        """Batch `index` of 0..num_batches-1 for this rank."""
        if not 0 <= index < self.num_batches:
            raise ValueError(f"expected 0 <= index < {self.num_batches}, got {index}")
        first = (index * self.world_size + self.rank) * self.micro_batch
        windows = first + np.arange(self.micro_batch, dtype=np.int64)
        windows[windows >= self.num_windows] = -1
        return gather(self.token_file, windows, self.context, self.mask_boundaries)


def gather(token_file: TokenFile, windows: np.ndarray, context: int, mask_boundaries: bool = False) -> Batch:
    """Read windows (any order, int64 [b]; -1 = padding row; the last one may be short) into one `Batch`."""
    tokens, T = token_file.tokens, context
    whole = (len(tokens) - 1) // T  # windows with all T targets
    regular = (windows >= 0) & (windows < whole)
    if regular.all():  # the training path: two strided views, two gathers of whole rows
        inputs = tokens[: whole * T].reshape(whole, T)[windows].astype(np.int64)
        targets = tokens[1 : whole * T + 1].reshape(whole, T)[windows].astype(np.int64)
    else:
        inputs = np.zeros((len(windows), T), dtype=np.int64)
        targets = np.full((len(windows), T), IGNORE, dtype=np.int64)
        for row, window in enumerate(windows):
            if window >= 0:
                piece = tokens[window * T : window * T + T + 1]
                inputs[row, : min(len(piece), T)] = piece[:T]
                targets[row, : len(piece) - 1] = piece[1:]
    if mask_boundaries:
        _mask_document_starts(targets, token_file.document_ends, windows * T)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(windows))


def _mask_document_starts(targets: np.ndarray, document_ends: np.ndarray, starts: np.ndarray) -> None:
    """Ignore target (row, t) where token starts[row] + t + 1 opens a document, i.e. is itself a document end."""
    T = targets.shape[1]
    starts = np.maximum(starts, -T)  # padding rows: their range below holds no document end
    low = np.searchsorted(document_ends, np.maximum(starts + 1, 0).astype(INDEX_DTYPE), side="left")
    high = np.searchsorted(document_ends, np.maximum(starts + T, 0).astype(INDEX_DTYPE), side="right")
    counts = high - low
    rows = np.repeat(np.arange(len(starts)), counts)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1, .. within each row
    ends = document_ends[low[rows] + nth].astype(np.int64)
    targets[rows, ends - 1 - starts[rows]] = IGNORE


def _check_layout(context: int, micro_batch: int, rank: int, world_size: int) -> None:
    if context < 1 or micro_batch < 1:
        raise DataError(f"data.context and train.micro_batch must be at least 1, got {context} and {micro_batch}")
    if not 0 <= rank < world_size:
        raise ValueError(f"expected 0 <= rank < world_size, got rank {rank} of {world_size}")
