"""The losses that a model must beat, against counts made by hand."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from efla_data.corpus import statistics
from efla_data.corpus.statistics import count_tokens, uniform_entropy, unigram_entropy
from efla_data.corpus.writer import write_token_files
from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile


def open_both(folder: Path, train: list[list[int]], heldout: list[list[int]], vocab_size: int = 6) -> list[TokenFile]:
    write_token_files(folder, {"train": train, "heldout": heldout}, vocab_size, eos_id=1)
    return [TokenFile.open(folder, "train"), TokenFile.open(folder, "heldout")]


def test_unigram_entropy_by_hand(tmp_path: Path) -> None:
    """Train 2 2 2 3 1, V = 6: p = (count + 1) / 11. Held out 2 4 1 gives the targets 4 (never seen) and 1."""
    train, heldout = open_both(tmp_path, [[2, 2, 2, 3, 1]], [[2, 4, 1]])
    assert unigram_entropy(train, heldout) == pytest.approx(-(math.log(1 / 11) + math.log(2 / 11)) / 2, rel=1e-12)
    assert unigram_entropy(train, heldout, smoothing=0.5) == pytest.approx(
        -(math.log(0.5 / 8) + math.log(1.5 / 8)) / 2, rel=1e-12
    )
    assert uniform_entropy(train) == pytest.approx(math.log(6))


def test_counts_do_not_depend_on_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(2, 50, 37).tolist(), 1] for _ in range(20)]
    train, heldout = open_both(tmp_path, documents, documents[:2], vocab_size=50)
    monkeypatch.setattr(statistics, "BLOCK", 11)
    expected = Counter(token for document in documents for token in document)
    assert count_tokens(train).tolist() == [expected[token] for token in range(50)]
    counts = Counter(heldout.tokens[1:].tolist())
    total = train.num_tokens + 50
    by_hand = -sum(n * math.log((expected[v] + 1) / total) for v, n in counts.items()) / (heldout.num_tokens - 1)
    assert unigram_entropy(train, heldout) == pytest.approx(by_hand, rel=1e-12)
    assert unigram_entropy(train, heldout) < uniform_entropy(train)


def test_vocabularies_must_agree(tmp_path: Path) -> None:
    train, _ = open_both(tmp_path / "a", [[2, 1]], [[3, 1]])
    _, other = open_both(tmp_path / "b", [[2, 1]], [[3, 1]], vocab_size=7)
    with pytest.raises(DataError, match=r"vocabulary sizes differ: 6 in .* 7 in"):
        unigram_entropy(train, other)
    _, single = open_both(tmp_path / "c", [[2, 1]], [[1]])
    with pytest.raises(DataError, match="fewer than 2 tokens"):
        unigram_entropy(train, single)
