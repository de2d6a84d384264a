"""The corpus that tests of preparation share."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from efla_data.corpus import sources
from efla_data.corpus.recipe import Recipe

from tests.data.material import jsonl, many_texts, sentencepiece_folder


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Four files of different kinds in several chunks, with a tokenizer."""
    monkeypatch.setattr(sources, "SMALLEST_CHUNK", 4000)
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.jsonl").write_bytes(jsonl(many_texts(60, seed=n)) + b"{broken\n")
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(jsonl(many_texts(60, seed=3))))
    tokenizer = sentencepiece_folder(tmp_path / "tokenizer")
    return Recipe([str(folder)], tokenizer=str(tokenizer), heldout_fraction=0.2)
