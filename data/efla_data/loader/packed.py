"""Windows of whole documents: each starts from nothing in its window, and predicts none but its own tokens."""

from __future__ import annotations

import numpy as np

from efla_data.errors import DataError
from efla_data.loader.packing import open_plan
from efla_data.loader.sequences import IGNORE, Rows, check_context, epoch_order
from efla_data.loader.token_file import TokenFile


def default_most(context: int) -> int:
    """Documents that a window of `context` positions may hold unless told: one for each chunk of 64, at least 8.

    Every batch has room for so many documents in each window, and the kernels a chunk of memory for each of them.
    """
    return max(8, context // 64)


class PackedWindows:
    """Windows with whole documents, as `packing` lays them out; what is left of a window is padding without targets.

    Documents longer than `context` are split. most: documents per window; None takes `default_most`.
    `filled` is the share of positions that have a target.
    """

    def __init__(self, token_file: TokenFile, context: int, most: int | None = None) -> None:
        check_context(context)
        self.context, self.most = context, default_most(context) if most is None else most
        if self.most < 1:
            raise DataError(f"data.max_documents must be at least 1, got {most}")
        self.token_file, self.fingerprint = token_file, token_file.fingerprint
        self.plan = open_plan(token_file, context, self.most)
        self.count = self.plan.info.windows
        if self.count < 1:
            raise DataError(f"{token_file.folder} ({token_file.split}): no document with a token to predict")
        self.filled = self.plan.info.positions / (self.count * context)
        self._eos = token_file.manifest.tokenizer.eos_id

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """See `epoch_order`."""
        return epoch_order(rows, self.count, seed)

    def read(self, windows: np.ndarray) -> Rows:
        """Document by document; padding holds EOS."""
        T, tokens, plan = self.context, self.token_file.tokens, self.plan
        inputs = np.full((len(windows), T), self._eos, dtype=np.int64)
        targets = np.full((len(windows), T), IGNORE, dtype=np.int64)
        ends = np.full((len(windows), self.most + 1), T, dtype=np.int64)
        for row, window in enumerate(windows.tolist()):
            if window < 0:
                continue
            first, last = plan.windows[window : window + 2].tolist()
            place = 0
            pieces = zip(plan.starts[first:last].tolist(), plan.lengths[first:last].tolist(), strict=True)
            for number, (start, length) in enumerate(pieces):
                ids = tokens[max(start - 1, 0) : start + length]
                # nothing stands before the first document of all: EOS, as before every other one
                inputs[row, place + length - (len(ids) - 1) : place + length] = ids[:-1]
                targets[row, place : place + length] = ids[-length:]
                place += length
                ends[row, number] = place
        return Rows(inputs, targets, ends)
