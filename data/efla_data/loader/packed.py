"""Sequences of whole documents. Each document starts from an empty state and predicts only its own tokens."""

from __future__ import annotations

import numpy as np

from efla_data.errors import DataError
from efla_data.loader.packing import open_plan
from efla_data.loader.sequences import IGNORE, Rows, check_context, epoch_order
from efla_data.loader.token_file import TokenFile


def default_max_documents(context: int) -> int:
    """Default of data.max_documents: one document for each chunk of 64 positions, at least 8.

    Every batch reserves this many document boundaries per sequence, and the kernels a chunk of memory for each.
    """
    return max(8, context // 64)


class PackedSequences:
    """Sequences of whole documents, as `packing` arranges them; padding without targets fills each sequence up.

    Documents longer than `context` are split. max_documents: documents per sequence; None takes
    `default_max_documents`. `filled` is the share of positions that have a target.
    """

    def __init__(self, token_file: TokenFile, context: int, max_documents: int | None = None) -> None:
        check_context(context)
        self.context = context
        self.max_documents = default_max_documents(context) if max_documents is None else max_documents
        if self.max_documents < 1:
            raise DataError(f"data.max_documents must be at least 1, got {max_documents}")
        self.token_file, self.fingerprint = token_file, token_file.fingerprint
        self.plan = open_plan(token_file, context, self.max_documents)
        self.count = self.plan.info.windows
        if self.count < 1:
            raise DataError(f"{token_file.folder} ({token_file.split}): no document with a token to predict")
        self.filled = self.plan.info.positions / (self.count * context)
        self._eos = token_file.manifest.tokenizer.eos_id

    def order(self, rows: np.ndarray, seed: int | None) -> np.ndarray:
        """See `epoch_order`."""
        return epoch_order(rows, self.count, seed)

    def read(self, sequences: np.ndarray) -> Rows:
        """Copy document by document; padding holds EOS."""
        T, tokens, plan = self.context, self.token_file.tokens, self.plan
        inputs = np.full((len(sequences), T), self._eos, dtype=np.int64)
        targets = np.full((len(sequences), T), IGNORE, dtype=np.int64)
        ends = np.full((len(sequences), self.max_documents + 1), T, dtype=np.int64)
        for row, sequence in enumerate(sequences.tolist()):
            if sequence < 0:
                continue
            first, last = plan.sequences[sequence : sequence + 2].tolist()
            place = 0
            segments = zip(plan.starts[first:last].tolist(), plan.lengths[first:last].tolist(), strict=True)
            for number, (start, length) in enumerate(segments):
                if place + length > T or start + length > len(tokens) or number >= self.max_documents:
                    where = self.token_file.folder / "packing"
                    raise DataError(
                        f"{where}: damaged plan of packed documents, sequence {sequence}; remove that folder"
                    )
                ids = tokens[max(start - 1, 0) : start + length]
                self.token_file.check_ids(ids, start)
                # The first document of the stream has no token before it: its first input stays EOS.
                inputs[row, place + length - (len(ids) - 1) : place + length] = ids[:-1]
                targets[row, place : place + length] = ids[-length:]
                place += length
                ends[row, number] = place
        return Rows(inputs, targets, ends)
