"""Losses that need no model, in nats per token: a trained model must be below them."""

from __future__ import annotations

import math

import numpy as np

from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile

BLOCK = 1 << 24  # tokens counted at a time


def uniform_entropy(token_file: TokenFile) -> float:
    """log V: the loss of a model that holds every id of the vocabulary equally likely."""
    return math.log(token_file.vocab_size)


def count_tokens(token_file: TokenFile, start: int = 0) -> np.ndarray:
    """How often each id occurs in tokens[start:], int64 [V]. Memory does not grow with the file."""
    counts = np.zeros(token_file.vocab_size, dtype=np.int64)
    for begin in range(start, token_file.num_tokens, BLOCK):
        counts += np.bincount(token_file.tokens[begin : begin + BLOCK], minlength=token_file.vocab_size)
    return counts


def unigram_entropy(train: TokenFile, heldout: TokenFile, smoothing: float = 1.0) -> float:
    """Loss on the held-out text of the token frequencies of the training text.

        p_v = (c_v + s) / (N + s V),     H = - 1/(M - 1) sum_{t=1}^{M-1} log p_{x_t}

    c_v: occurrences of id v among the N training tokens; s: additive smoothing (1 = Laplace), so that an id that
    training never saw costs much but not everything; x: the M held-out tokens, of which the first is predicted by
    nothing: the targets are those of the validation loss. DataError when the two splits have different
    vocabularies.
    """
    if train.vocab_size != heldout.vocab_size:
        raise DataError(
            f"vocabulary sizes differ: {train.vocab_size} in {train.folder}, {heldout.vocab_size} in {heldout.folder}"
        )
    counts = count_tokens(train) + smoothing
    targets = count_tokens(heldout, start=1)
    if not targets.any():
        raise DataError(f"{heldout.folder} ({heldout.split}): fewer than 2 tokens, nothing to predict")
    seen = targets > 0
    return float(-(targets[seen] * np.log(counts[seen] / counts.sum())).sum() / targets.sum())
