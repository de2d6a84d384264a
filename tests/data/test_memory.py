"""Memory stays bounded: a line of 10 MB, a word of 10 MB, many documents."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import zstandard
from efla_data.loader.token_file import TokenFile

from tests.data.material import EOS, jsonl, load, sentencepiece_folder

PREPARE = """
import json, resource, sys
import efla_data.corpus.prepare
from efla_data.corpus.recipe import Recipe
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
efla_data.corpus.prepare.prepare(Recipe.from_dict(json.loads(sys.argv[1])), sys.argv[2], processes=1)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def prepare_apart(recipe: dict[str, object], out: Path) -> float:
    """Prepare in a process of its own; MiB that its peak grew by."""
    command = [sys.executable, "-c", PREPARE, json.dumps(recipe), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["line", "word"])
def test_ten_megabytes_in_one_line(tmp_path: Path, kind: str) -> None:
    """One document of 10 MB in a line, or of 3 MB in a word: kept whole, one EOS (the library alone took 1300 MiB)."""
    rng = np.random.default_rng(0)
    if kind == "line":
        words = ["".join(word) for word in rng.choice(list("abcdefghij"), (5000, 7))]
        text = " ".join(rng.choice(words, 1_250_000))
        assert len(text) >= 9_999_999
    else:
        text = "".join(rng.choice(list("abcdefghij"), 3_000_000))
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "the cat"}) + "\n" + json.dumps({"text": text}) + "\n")
    tokenizer = sentencepiece_folder(tmp_path / "tokenizer")
    recipe = {"sources": [str(tmp_path / "long.jsonl")], "tokenizer": str(tokenizer)}
    assert prepare_apart(recipe, tmp_path / "out") < 400
    file = TokenFile.open(tmp_path / "out", verify=True)
    assert file.num_documents == 2
    ids = file.document(1)
    assert np.count_nonzero(ids == EOS) == 1 and ids[-1] == EOS
    assert load(tokenizer).decode(ids[:-1].tolist()) == text


PACKERS = {
    "gz": lambda: zlib.compressobj(wbits=31),
    "xz": lzma.LZMACompressor,
    "zst": lambda: zstandard.ZstdCompressor(level=19).compressobj(),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_small_file_that_unpacks_to_much_is_read_in_bounded_memory(tmp_path: Path, suffix: str) -> None:
    """256 MiB to 1 GiB of short lines in less than 2 MB: the amount unpacked at once is bounded (zst had no bound)."""
    lines = b'{"text": "' + b" " * 16_000 + b'"}\n'
    path = tmp_path / f"bomb.jsonl.{suffix}"
    packer, block, blocks = PACKERS[suffix](), lines * (1 << 10), 64 if suffix == "zst" else 16
    path.write_bytes(
        b"".join(packer.compress(part) for part in [*[block] * blocks, jsonl(["the cat"])]) + packer.flush()
    )
    assert path.stat().st_size < 2_000_000
    recipe = {"sources": [str(path)], "tokenizer": str(sentencepiece_folder(tmp_path / "tokenizer"))}
    assert prepare_apart(recipe, tmp_path / "out") < 120
    assert TokenFile.open(tmp_path / "out").manifest.skipped == {"empty": blocks << 10}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("options", [{}, {"deduplicate": True}, {"sample": "documents", "max_tokens": 100_000}])
def test_peak_does_not_grow_with_the_corpus(tmp_path: Path, options: dict[str, object]) -> None:
    """Four times the text (20 MB instead of 5), the same peak within 40 MiB."""
    tokenizer = sentencepiece_folder(tmp_path / "tokenizer")
    rng = np.random.default_rng(0)
    words = np.array(["the", "cat", "a", "at", "sat", "dawn"])
    text = " ".join(rng.choice(words, 2000))
    peaks = []
    for copies in (700, 2800):
        (tmp_path / "text.jsonl").write_bytes(jsonl(f"{n} {text}" for n in range(copies)))
        recipe = {"sources": [str(tmp_path / "text.jsonl")], "tokenizer": str(tokenizer), **options}
        peaks.append(prepare_apart(recipe, tmp_path / f"out{copies}"))
    assert abs(peaks[1] - peaks[0]) < 40
