"""A keyed bijection of 0..size-1 that is computed, not stored: the order of windows in an epoch.

A balanced Feistel network on 2h bits, 4^h >= size, is a bijection whatever its round function:

    (l, r) -> (r, l xor F_i(r)),   F_i(r) = splitmix64(r + key_i) mod 2^h,   i = 1..8

Values that land outside 0..size-1 are sent through again (cycle walking), which keeps it a bijection on 0..size-1.
Since 4^h < 4 size (for size > 1), a value needs fewer than four passes on average. Any position costs the same, so
seeking is free and a corpus of any size needs no index in memory.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8


def round_keys(*labels: int | str) -> np.ndarray:
    """ROUNDS uint64 keys from the labels (seed, epoch, ...), by hashing, so that neighbouring seeds share nothing."""
    digest = hashlib.blake2b(":".join(map(str, labels)).encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def permute(positions: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Images of `positions` (integers in 0..size-1) under the bijection with `keys`; int64, same shape."""
    values = np.asarray(positions, dtype=np.uint64)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _feistel(values, half, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_splitmix64(right + key) & mask)
    return (left << shift) | right


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """Finaliser of the splitmix64 generator; uint64 arithmetic wraps by intent."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
