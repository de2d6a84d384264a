"""Batches as functions: the same sequences for any layout, every sequence once per epoch, any step at once."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from efla_data.corpus.writer import write_token_files
from efla_data.errors import DataError
from efla_data.loader.batches import IGNORE, TrainLoader, ValidationLoader
from efla_data.loader.permutation import permute, round_keys
from efla_data.loader.sequences import StreamSequences
from efla_data.loader.token_file import TokenFile

from tests.data.material import counting_tokens

T = 8


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """1003 tokens: 125 sequences of 8, and two tokens in none. Token p is p + 1, or 0 at a document's end."""
    return counting_tokens(tmp_path_factory.mktemp("counting"), 1003)


def global_batch(
    file: TokenFile, step: int, micro_batch: int, world_size: int, size: int = 24, **options: object
) -> list[int]:
    """Sequences of one step over all ranks and micro-batches, in the order of the global batch."""
    rows: dict[int, int] = {}
    for rank in range(world_size):
        loader = TrainLoader(StreamSequences(file, T), size, micro_batch, rank, world_size, **options)  # type: ignore[arg-type]
        for micro in range(loader.micro_steps):
            sequences = loader.batch(step, micro).sequence_ids.tolist()
            for i, sequence in enumerate(sequences):
                rows[(micro * world_size + rank) * micro_batch + i] = sequence
    assert sorted(rows) == list(range(size))
    return [rows[j] for j in range(size)]


def epoch(file: TokenFile, number: int, seed: int = 0, shuffle: bool = True) -> list[int]:
    """Sequences of one epoch, in order."""
    count = StreamSequences(file, T).count
    loader = TrainLoader(StreamSequences(file, T), 1, 1, seed=seed, shuffle=shuffle)
    return [int(loader.sequence_ids(number * count + place, 0)[0]) for place in range(count)]


def test_inputs_and_targets_are_the_stream_shifted_by_one(file: TokenFile) -> None:
    loader = TrainLoader(StreamSequences(file, T), 4, 4, seed=3)
    for step in range(40):
        batch = loader.batch(step, 0)
        assert batch.input_ids.shape == batch.targets.shape == (4, T)
        assert batch.input_ids.dtype == batch.targets.dtype == batch.sequence_ids.dtype == torch.int64
        for row, sequence in enumerate(batch.sequence_ids.tolist()):
            assert batch.input_ids[row].tolist() == file.tokens[sequence * T : sequence * T + T].tolist()
            assert batch.targets[row].tolist() == file.tokens[sequence * T + 1 : sequence * T + T + 1].tolist()


@pytest.mark.parametrize(
    ("micro_batch", "world_size"), [(24, 1), (1, 1), (8, 1), (12, 2), (3, 2), (6, 4), (1, 8), (3, 8)]
)
@pytest.mark.parametrize("step", [0, 4, 5, 1000])
def test_same_global_batch_for_any_layout(file: TokenFile, micro_batch: int, world_size: int, step: int) -> None:
    """Saved on 2 ranks, resumed on 1, or cut otherwise: the same sequences in the same places."""
    expected = TrainLoader(StreamSequences(file, T), 24, 24, seed=7).sequence_ids(step, 0).tolist()
    assert global_batch(file, step, micro_batch, world_size, seed=7) == expected


@pytest.mark.parametrize("world_size", [1, 5, 25])
def test_ranks_together_read_every_sequence_once(file: TokenFile, world_size: int) -> None:
    """5 steps of 25 sequences are one epoch of 125: no sequence is read twice by any rank, none is left out."""
    seen: list[int] = []
    for rank in range(world_size):
        loader = TrainLoader(StreamSequences(file, T), 25, 25 // world_size, rank, world_size, seed=1)
        seen += [int(sequence) for step in range(5) for sequence in loader.sequence_ids(step, 0)]
    assert sorted(seen) == list(range(125))


def test_tokens_of_an_epoch_are_the_corpus(file: TokenFile) -> None:
    """Over two ranks: inputs hold each place once, and nothing but the short end is left out."""
    inputs: list[int] = []
    targets: list[int] = []
    for rank in range(2):
        loader = TrainLoader(StreamSequences(file, T), 10, 5, rank, 2, seed=2)
        for step in range(13):
            batch = loader.batch(step, 0)
            first = step * 10 + rank * 5
            keep = [i for i in range(5) if first + i < 125]  # the 13th step runs into the second epoch
            inputs += batch.input_ids[keep].flatten().tolist()
            targets += batch.targets[keep].flatten().tolist()
    assert sorted(inputs) == sorted(file.tokens[:1000].tolist())
    assert sorted(targets) == sorted(file.tokens[1:1001].tolist())


def test_epochs_and_seeds_have_orders_of_their_own(file: TokenFile) -> None:
    orders = [epoch(file, number, seed) for number in range(3) for seed in range(3)]
    for order in orders:
        assert sorted(order) == list(range(125))
        assert order != list(range(125))
    assert len({tuple(order) for order in orders}) == len(orders)
    assert epoch(file, 1, 1) == epoch(file, 1, 1)
    assert epoch(file, 1, shuffle=False) == list(range(125))


def test_a_step_may_straddle_epochs(file: TokenFile) -> None:
    """125 sequences in steps of 24: step 5 ends the first epoch and begins the second, dropping none."""
    rows = [sequence for step in range(11) for sequence in global_batch(file, step, 8, 1, seed=9)]
    assert rows[:125] == epoch(file, 0, 9)
    assert rows[125:250] == epoch(file, 1, 9)


def test_stopping_anywhere_and_going_on_changes_nothing(file: TokenFile) -> None:
    """A loader has no state: 40 steps straight, or anew from step 7, or at 60 % of epoch 2 on another world size."""
    straight = [global_batch(file, step, 4, 1, seed=5) for step in range(40)]
    for start, world_size, micro_batch in ((7, 1, 4), (8, 2, 6), (20, 3, 2)):
        assert [global_batch(file, step, micro_batch, world_size, seed=5) for step in range(start, 40)] == straight[
            start:
        ]
    shuffled = np.random.default_rng(0).permutation(40)
    loader = TrainLoader(StreamSequences(file, T), 24, 24, seed=5)
    for step in shuffled:
        assert loader.sequence_ids(int(step), 0).tolist() == straight[step]


def test_seek_costs_nothing(file: TokenFile) -> None:
    start = time.perf_counter()
    loader = TrainLoader(StreamSequences(file, T), 24, 24, seed=5)
    loader.batch(10**6, 0)
    loader.batch(10**12, 0)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 10, 24, 25, 26, 1000, 4096, 4097, 65537])
def test_permutation_is_a_bijection(size: int) -> None:
    for seed in range(3):
        assert np.array_equal(np.sort(permute(np.arange(size), size, round_keys(seed))), np.arange(size))


def test_permutation_looks_random() -> None:
    """Places and images are unrelated, and so are neighbours (bounds at 5 standard deviations)."""
    size = 20_000
    for seed in range(5):
        images = permute(np.arange(size), size, round_keys("test", seed))
        assert abs(np.corrcoef(images, np.arange(size))[0, 1]) < 5 / size**0.5
        assert abs(np.corrcoef(images[1:], images[:-1])[0, 1]) < 5 / size**0.5
        table = np.histogram2d(np.arange(size), images, bins=10)[0]
        chi2 = ((table - size / 100) ** 2 / (size / 100)).sum()
        assert abs(chi2 - 81) < 5 * (2 * 81) ** 0.5


def test_permutation_of_huge_sizes() -> None:
    """Near 2^62 arithmetic must not wrap: distinct places keep distinct images inside the range."""
    size = 2**62 - 57
    places = np.concatenate([np.arange(1000), size - 1 - np.arange(1000)])
    images = permute(places, size, round_keys(1))
    assert len(np.unique(images)) == 2000
    assert images.min() >= 0 and images.max() < size


@pytest.mark.parametrize("loader", ["training", "validation"])
def test_masked_boundaries(file: TokenFile, loader: str) -> None:
    """With the switch the target is ignored exactly where it opens a document; without it (default) nowhere."""
    for mask in (False, True):
        if loader == "training":
            batches = [TrainLoader(StreamSequences(file, T, mask), 5, 5, seed=1).batch(step, 0) for step in range(25)]
        else:
            sequential = ValidationLoader(StreamSequences(file, T, mask, tail=True), 5)
            batches = [sequential.batch(index) for index in range(sequential.num_batches)]
        starts = {int(end) for end in file.document_ends.tolist()}
        for batch in batches:
            for row, sequence in enumerate(batch.sequence_ids.tolist()):
                for t in range(T):
                    place = sequence * T + t + 1
                    if sequence < 0 or place >= file.num_tokens or (mask and place in starts):
                        assert batch.targets[row, t] == IGNORE
                    else:
                        assert batch.targets[row, t] == file.tokens[place]


def test_masking_with_bos_ignores_the_bos_of_the_next_document(tmp_path: Path) -> None:
    write_token_files(tmp_path, {"train": [[2, 5, 6, 1], [2, 7, 1], [2, 8, 1]]}, 10, eos_id=1, bos_id=2)
    batch = TrainLoader(StreamSequences(TokenFile.open(tmp_path), 9, True), 1, 1).batch(0, 0)
    assert batch.input_ids.tolist() == [[2, 5, 6, 1, 2, 7, 1, 2, 8]]
    assert batch.targets.tolist() == [[5, 6, 1, IGNORE, 7, 1, IGNORE, 8, 1]]


@pytest.mark.parametrize(
    ("context", "micro_batch", "world_size"), [(8, 4, 1), (8, 3, 2), (7, 16, 3), (2000, 2, 2), (1, 7, 1)]
)
def test_validation_covers_each_target_once(file: TokenFile, context: int, micro_batch: int, world_size: int) -> None:
    targets: list[int] = []
    sequences: list[int] = []
    loaders = [
        ValidationLoader(StreamSequences(file, context, tail=True), micro_batch, rank, world_size)
        for rank in range(world_size)
    ]
    assert len({loader.num_batches for loader in loaders}) == 1
    for index in range(loaders[0].num_batches):
        for loader in loaders:
            batch = loader.batch(index)
            assert batch.input_ids.shape == (micro_batch, context)
            for row, sequence in enumerate(batch.sequence_ids.tolist()):
                valid = batch.targets[row] != IGNORE
                targets += batch.targets[row][valid].tolist()
                sequences += [sequence] if sequence >= 0 else []
                places = np.flatnonzero(valid.numpy()) + max(sequence, 0) * context
                assert batch.input_ids[row][valid].tolist() == file.tokens[places].tolist()
    assert targets == file.tokens[1:].tolist()
    assert sequences == list(range(loaders[0].num_sequences))


def test_last_tokens_of_the_stream(tmp_path: Path) -> None:
    """N = 2 T + 1 gives two sequences, N = 2 T only one: the last target must exist."""
    for tokens, sequences in ((2 * T + 1, 2), (2 * T, 1), (T + 1, 1)):
        loader = TrainLoader(StreamSequences(counting_tokens(tmp_path / str(tokens), tokens), T), 1, 1)
        assert loader.sequences.count == sequences
        for step in range(4):
            loader.batch(step, 0)


def test_what_cannot_be_is_refused_with_the_numbers(file: TokenFile, tmp_path: Path) -> None:
    small = counting_tokens(tmp_path / "small", T)
    with pytest.raises(DataError, match=r"8 tokens, fewer than one sequence of context 8 \+ 1"):
        StreamSequences(small, T)
    with pytest.raises(
        DataError, match="global batch of 24 sequences is not a multiple of micro_batch 5 x 2 processes = 10"
    ):
        TrainLoader(StreamSequences(file, T), 24, 5, 0, 2)
    with pytest.raises(DataError, match="at least 1, got 0"):
        TrainLoader(StreamSequences(file, T), 24, 0)
    with pytest.raises(ValueError, match="expected 0 <= rank < world_size, got rank 2 of 2"):
        ValidationLoader(StreamSequences(file, T, tail=True), 4, 2, 2)
    with pytest.raises(DataError, match="1 tokens, at least 2"):
        StreamSequences(counting_tokens(tmp_path / "one", 1), T, tail=True)
    loader = TrainLoader(StreamSequences(file, T), 24, 12)
    for step, micro in ((-1, 0), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match="expected step >= 0 and 0 <= micro < 2"):
            loader.batch(step, micro)
    with pytest.raises(ValueError, match="expected 0 <= index < 32"):
        ValidationLoader(StreamSequences(file, T, tail=True), 4).batch(32)


@pytest.mark.parametrize(("context", "micro_batch"), [(2048, 8), (256, 16)])
def test_speed(tmp_path: Path, context: int, micro_batch: int) -> None:
    """20 M tokens/s of processor time from a warm cache, on one core (wall time would measure what else runs)."""
    file = counting_tokens(tmp_path, 4_000_000, document=500, vocab_size=1 << 23)
    loader = TrainLoader(StreamSequences(file, context), 4 * micro_batch, micro_batch, seed=1)
    loader.batch(0, 0)
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        for step in range(64):
            for micro in range(4):
                loader.batch(step, micro)
        best = max(best, 64 * 4 * micro_batch * context / (time.process_time() - start))
    assert best > 20e6
