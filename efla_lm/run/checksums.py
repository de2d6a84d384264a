"""Checksums of files, block by block: CRC-32 (ISO 3309), which several threads compute faster than a disk reads.

A damaged bit, a burst of up to 32 bits, or a block of another file is found, the last with probability 1 - 2^-32. It is
no signature: who can write the files can write the checksums.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BLOCK = 1 << 24  # bytes
THREADS = min(8, os.cpu_count() or 1)

Span = tuple[int, int]  # first byte, byte after the last


@dataclass(frozen=True)
class FileSum:
    """Size of a file, and the CRC-32 of each of its blocks, or None where only the size is known."""

    bytes: int
    crc32: list[int] | None = None


def file_sums(paths: Iterable[Path], block: int) -> dict[str, FileSum]:
    """Size and checksums of files, by file name. Raises OSError for one that cannot be read."""
    sizes = {path: path.stat().st_size for path in paths}
    pieces = [(path, number) for path, size in sizes.items() for number in range(-(-size // block))]
    sums: dict[Path, list[int]] = {path: [] for path in sizes}
    with ThreadPoolExecutor(THREADS) as pool:
        for (path, _), value in zip(
            pieces, pool.map(lambda piece: _crc(piece[0], piece[1], block), pieces), strict=True
        ):
            sums[path].append(value)
    return {path.name: FileSum(size, sums[path]) for path, size in sizes.items()}


def wrong_size(path: Path, expected: FileSum) -> str | None:
    """Why the file is not of the expected size, or None."""
    size = path.stat().st_size if path.is_file() else -1
    if size == expected.bytes:
        return None
    return f"{path}: expected {expected.bytes} bytes, found {f'{size} bytes' if size >= 0 else 'nothing'}"


def damaged_file(files: Sequence[tuple[Path, FileSum, Sequence[Span] | None]], block: int) -> str | None:
    """Which file does not have the bytes of its checksums, and where, or None. Spans: what is read (None: all)."""
    pieces = [
        (path, number, expected)
        for path, sums, spans in files
        for number, expected in enumerate(sums.crc32 or [])
        if spans is None or any(start < (number + 1) * block and number * block < end for start, end in spans)
    ]

    def check(path: Path, number: int, expected: int) -> str | None:
        try:
            found = _crc(path, number, block)
        except OSError as error:
            return f"{path}: cannot be read ({error})"
        where = f"{path}: bytes from {number * block} on"
        return None if found == expected else f"{where} have another checksum than when it was saved"

    with ThreadPoolExecutor(THREADS) as pool:
        return next(filter(None, pool.map(lambda piece: check(*piece), pieces)), None)


def _crc(path: Path, number: int, block: int) -> int:
    with path.open("rb", buffering=0) as file:
        file.seek(number * block)
        value, left = 0, block
        while left > 0 and (content := file.read(min(left, 1 << 22))):
            value = zlib.crc32(content, value)
            left -= len(content)
    return value
