"""A keyed bijection of 0..size-1, computed and not stored: the order of sequences in an epoch.

A value x < a b, with a = ceil(sqrt(size)) and b = ceil(size / a), is a pair l = x // b, r = x mod b. A generalised
Feistel network changes one of the two at a time by a function of the other. Each round is invertible for any function:

    l <- (l + F_i(r)) mod a   for even i,     r <- (r + F_i(l)) mod b   for odd i,     F_i(y) = splitmix64(y + key_i)

with i = 0..7. The few values that land in size..ab-1 (fewer than a of them) go through the network again, which keeps
the map a bijection on 0..size-1. Every position costs the same, so seeking is free and no index is kept in memory.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 8


def round_keys(*labels: int | str) -> np.ndarray:
    """ROUNDS uint64 keys hashed from the labels (seed, epoch, ...), so that neighbouring seeds share nothing."""
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
        # Both terms are reduced before they are added: an unreduced sum could wrap at 2^64.
        if i % 2 == 0:
            left = (left + _splitmix64(right + key) % ua) % ua
        else:
            right = (right + _splitmix64(left + key) % ub) % ub
    return left * ub + right


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Finaliser of the splitmix64 generator. uint64 arithmetic wraps on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
