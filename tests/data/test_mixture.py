"""Mixtures: proportions at every stretch, each corpus in epochs of its own, the same for any layout."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from efla_data.errors import DataError
from efla_data.loader.batches import IGNORE, TrainLoader
from efla_data.loader.mixture import MixedSequences, whole_shares
from efla_data.loader.packed import PackedSequences
from efla_data.loader.sequences import Sequences, StreamSequences

from tests.data.material import counting_tokens

T = 8


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Sequences]:
    """125, 50 and 6 sequences."""
    folder = tmp_path_factory.mktemp("mixture")
    return [StreamSequences(counting_tokens(folder / str(n), n), T) for n in (1003, 405, 50)]


def drawn(
    parts: list[Sequences], weights: list[float], rows: int, seed: int | None = 5
) -> tuple[np.ndarray, np.ndarray]:
    """(corpus, its sequence) at the first places."""
    mixed = MixedSequences(parts, weights)
    sequences = mixed.order(np.arange(rows), seed)
    owners = np.searchsorted(mixed.bounds, sequences, side="right") - 1
    return owners, sequences - mixed.bounds[owners]


@pytest.mark.parametrize("weights", [[0.7, 0.2, 0.1], [1, 1, 1], [5, 3, 1e-3], [1 / 3, 1 / 7, 0.5238]])
def test_every_stretch_holds_the_proportions(parts: list[Sequences], weights: list[float]) -> None:
    owners, _ = drawn(parts, weights, 5000)
    for index, weight in enumerate(weights):
        seen = np.cumsum(owners == index)
        expected = np.arange(1, 5001) * weight / sum(weights)
        assert np.abs(seen - expected).max() < 2


def test_each_corpus_is_read_in_epochs_reshuffled(parts: list[Sequences]) -> None:
    """However often the small one comes round while the large one is read once: every sequence once per epoch."""
    owners, sequences = drawn(parts, [0.5, 0.3, 0.2], 1000)
    for index, part in enumerate(parts):
        own = sequences[owners == index]
        epochs = [own[start : start + part.count].tolist() for start in range(0, len(own) - part.count, part.count)]
        assert len(epochs) >= 3
        for epoch in epochs:
            assert sorted(epoch) == list(range(part.count))
        assert len({tuple(epoch) for epoch in epochs}) > 1
    in_order = drawn(parts, [0.5, 0.3, 0.2], 1000, seed=None)[1]
    assert in_order[owners == 1].tolist()[:60] == [*range(50), *range(10)]


def test_same_global_batch_for_any_layout_and_any_step(parts: list[Sequences]) -> None:
    mixed = MixedSequences(parts, [0.7, 0.2, 0.1])
    straight = [TrainLoader(mixed, 24, 24, seed=5).sequence_ids(step, 0).tolist() for step in range(40)]
    for micro_batch, world_size in ((1, 1), (12, 2), (3, 4), (1, 8)):
        loaders = [TrainLoader(mixed, 24, micro_batch, rank, world_size, seed=5) for rank in range(world_size)]
        for step in (0, 7, 13, 39):
            ids = [
                sequence
                for micro in range(loaders[0].micro_steps)
                for loader in loaders
                for sequence in loader.sequence_ids(step, micro).tolist()
            ]
            assert ids == straight[step]
    assert [sequence for step in straight for sequence in step] == mixed.order(np.arange(960), 5).tolist()


@pytest.mark.parametrize("packed", [False, True])
def test_batches_are_the_sequences_of_their_corpora(tmp_path: Path, packed: bool) -> None:
    files = [counting_tokens(tmp_path / str(n), n, document=d) for n, d in ((1003, 10), (405, 7), (50, 5))]
    parts: list[Sequences] = [PackedSequences(file, T, 2) if packed else StreamSequences(file, T) for file in files]
    mixed = MixedSequences(parts, [0.5, 0.3, 0.2])
    loader = TrainLoader(mixed, 10, 10, seed=1)
    for step in range(5):
        batch = loader.batch(step, 0)
        rows = batch.input_ids.view(10, T), batch.targets.view(10, T)
        for row, sequence in enumerate(batch.sequence_ids.tolist()):
            owner = int(np.searchsorted(mixed.bounds, sequence, side="right")) - 1
            alone = parts[owner].read(np.array([sequence - mixed.bounds[owner]]))
            assert rows[0][row].tolist() == alone.inputs[0].tolist()
            assert rows[1][row].tolist() == alone.targets[0].tolist()
            assert (batch.cu_seqlens is not None) == packed
            if batch.cu_seqlens is not None and alone.ends is not None:
                offsets = batch.cu_seqlens[1:].view(10, 3)[row] - row * T
                assert offsets.tolist() == alone.ends[0].tolist()
    nothing = mixed.read(np.array([-1, 3, 130, -1]))
    assert (nothing.targets[[0, 3]] == IGNORE).all() and (nothing.targets[[1, 2]] != IGNORE).any(1).all()


def test_shares() -> None:
    assert whole_shares([0.7, 0.2, 0.1], 3) == [7, 2, 1]
    assert whole_shares([2, 1], 2) == [666667, 333333]
    assert whole_shares([50, 50], 2) == [1, 1]
    assert sum(whole_shares([1 / 3, 1 / 7, 0.5238], 3)) == 10**6
    for weights in ([1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]):
        with pytest.raises(DataError, match=r"data\.weights: expected 2 numbers above 0"):
            whole_shares(weights, 2)
    with pytest.raises(DataError, match="never drawn"):
        whole_shares([1, 1e-8], 2)


def test_fingerprint_tells_content_and_weights(parts: list[Sequences]) -> None:
    prints = {MixedSequences(parts[:2], weights).fingerprint for weights in ([1, 2], [2, 1])}
    prints.add(MixedSequences(parts[1::-1], [1, 2]).fingerprint)
    assert len(prints) == 3
    assert MixedSequences(parts[:2], [1, 2]).fingerprint == MixedSequences(parts[:2], [10, 20]).fingerprint


def test_seek_costs_nothing(parts: list[Sequences]) -> None:
    start = time.perf_counter()
    loader = TrainLoader(MixedSequences(parts, [0.7, 0.2999999, 0.1]), 24, 24, seed=5)
    loader.batch(10**6, 0)
    loader.batch(10**12, 0)
    assert time.perf_counter() - start < 1
