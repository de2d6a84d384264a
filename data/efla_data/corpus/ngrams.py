"""n-grams of normalised words as 64-bit hashes: what a contamination report compares.

Words are runs of letters and digits, case folded; everything else only separates. With w_i the 64-bit hash of word i

    h_i = sum_{j < n} w_{i+j} P^{n-1-j}  mod 2^64,     i = 0 .. words - n

Of 10^7 n-grams of tasks and 5 10^10 of a corpus, 0.03 are expected to be equal by accident.
"""

from __future__ import annotations

import hashlib
import re

import numpy as np

WORDS = re.compile(r"[^\W_]+")
P = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication is invertible
MEMO = 1 << 18  # words whose hashes are remembered


class _Hashes(dict[str, int]):
    """word -> hash, computed on first use; cleared when full."""

    def __missing__(self, word: str) -> int:
        if len(self) >= MEMO:
            self.clear()
        value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        self[word] = value
        return value


_hashes = _Hashes()


def normalised_words(text: str) -> list[str]:
    """The words of a text."""
    return WORDS.findall(text.casefold())


def ngram_hashes(words: list[str], n: int) -> np.ndarray:
    """uint64 [max(words - n + 1, 0)]."""
    count = len(words) - n + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    single = np.fromiter(map(_hashes.__getitem__, words), dtype=np.uint64, count=len(words))
    total = single[:count].copy()
    for j in range(1, n):
        total *= P
        total += single[j : j + count]
    return total


class GramSet:
    """Distinct n-grams, sorted, and a quick test that most others fail."""

    TABLE_BITS = 25

    def __init__(self, grams: np.ndarray) -> None:
        self.grams = grams
        self._table = np.zeros(1 << self.TABLE_BITS, dtype=bool)
        self._table[self._slot(grams)] = True

    def _slot(self, hashes: np.ndarray) -> np.ndarray:
        return hashes >> np.uint64(64 - self.TABLE_BITS)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Places in `grams` of those `hashes` that are there, int64, in their order."""
        likely = hashes[self._table[self._slot(hashes)]]
        places = np.searchsorted(self.grams, likely)
        places = np.minimum(places, max(len(self.grams) - 1, 0))
        return places[self.grams[places] == likely] if len(self.grams) else np.empty(0, np.int64)
