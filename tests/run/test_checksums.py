"""Checksums of files by blocks: what changed is found, and only what is asked for is read."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from efla_lm.run.checksums import FileSum, damaged_file, file_sums, wrong_size

BLOCK = 64


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_sums_are_those_of_the_blocks(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    (tmp_path / "b").write_bytes(b"b")
    found = file_sums([tmp_path / "a", tmp_path / "b"], BLOCK)
    assert found["a"] == FileSum(size, [zlib.crc32(content[i : i + BLOCK]) for i in range(0, size, BLOCK)])
    assert found["b"] == FileSum(1, [zlib.crc32(b"b")])
    assert damaged_file([(tmp_path / name, sums, None) for name, sums in found.items()], BLOCK) is None


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    content, path = os.urandom(200), tmp_path / "a"
    path.write_bytes(content)
    sums = file_sums([path], BLOCK)["a"]
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        assert wrong_size(path, sums) is None
        assert f"bytes from {position // BLOCK * BLOCK} on" in (damaged_file([(path, sums, None)], BLOCK) or "")
        beside = [(0, position // BLOCK * BLOCK), ((position // BLOCK + 1) * BLOCK, 200)]
        assert damaged_file([(path, sums, beside)], BLOCK) is None
        assert damaged_file([(path, sums, [(position, position + 1)])], BLOCK)


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert "expected 4 bytes, found 3 bytes" in (wrong_size(tmp_path / "a", FileSum(4)) or "")
    assert "found nothing" in (wrong_size(tmp_path / "b", FileSum(4)) or "")
    assert "cannot be read" in (damaged_file([(tmp_path / "b", FileSum(4, [1]), None)], BLOCK) or "")
