"""A keyed bijection of 0..size-1 that is computed, not stored: the order of windows in an epoch.

A value x < a b, with a = ceil(sqrt(size)) and b = ceil(size / a), is a pair l = x // b, r = x mod b. A generalised
Feistel network changes one of them at a time by a function of the other, which can be undone whatever that function is:

    l <- (l + F_i(r)) mod a   for even i,     r <- (r + F_i(l)) mod b   for odd i,     F_i(y) = splitmix64(y + key_i)

with i = 0..7. The few values that land in size..ab-1 (fewer than a of them) are sent through again, which keeps it a
bijection on 0..size-1. Any position costs the same: seeking is free, and a corpus of any size needs no index in memory.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 8


def round_keys(*labels: int | str) -> np.ndarray:
    """ROUNDS uint64 keys from the labels (seed, epoch, ...), by hashing, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(":".join(map(str, labels)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Images of `positions` (integers in 0..size-1) under the bijection with `keys`; int64, same shape."""
    values = np.array(positions, dtype=np.uint64)
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
    values = _feistel(values, a, b, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], a, b, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    ua, ub = np.uint64(a), np.uint64(b)
    left: np.ndarray = values // ub
    right: np.ndarray = values % ub
    for i, key in enumerate(keys):
        # The sum is of two reduced terms: an unreduced one could wrap at 2^64 for some values only.
        if i % 2 == 0:
            left = (left + _splitmix64(right + key) % ua) % ua
        else:
            right = (right + _splitmix64(left + key) % ub) % ub
    return left * ub + right


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Finaliser of the splitmix64 generator; uint64 arithmetic wraps by intent."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
