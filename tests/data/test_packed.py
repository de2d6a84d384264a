"""Sequences of whole documents: every target once, in its own document, opened as evaluation opens a text."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from efla_data.corpus.writer import write_token_files
from efla_data.errors import DataError
from efla_data.loader import packing
from efla_data.loader.batches import IGNORE, TrainLoader, ValidationLoader
from efla_data.loader.packed import PackedSequences, default_max_documents
from efla_data.loader.token_file import TokenFile

EOS, BOS = 0, 1
T = 16


def documents(bos: bool, count: int = 200, seed: int = 0, longest: int = 70) -> list[list[int]]:
    """Documents of 1 to `longest` ids (EOS alone among them) whose ids tell the document and the place."""
    rng = np.random.default_rng(seed)
    lengths = [*rng.integers(1, longest, count), 1, T, T + 1, 2 * T, 3 * T + 7]
    opening = [BOS] if bos else []
    return [[*opening, *(2 + 100 * d + np.arange(n - 1)).tolist(), EOS] for d, n in enumerate(lengths)]


def token_file(folder: Path, texts: list[list[int]], bos: bool) -> TokenFile:
    write_token_files(folder, {"train": texts}, 1 << 20, EOS, BOS if bos else None)
    return TokenFile.open(folder)


def pieces_of(texts: list[list[int]], bos: bool) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(inputs, targets) of every piece, cut from the documents one by one."""
    pieces = []
    for text in texts:
        sequence = text if bos else [EOS, *text]
        for start in range(0, len(sequence) - 1, T):
            part = sequence[start : start + T + 1]
            pieces.append((tuple(part[:-1]), tuple(part[1:])))
    return pieces


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("most", [1, 3, 8, 16])
def test_every_piece_of_every_document_once(tmp_path: Path, bos: bool, most: int) -> None:
    texts = documents(bos)
    sequences = PackedSequences(token_file(tmp_path, texts, bos), T, most)
    found = []
    for first in range(0, sequences.count, 7):
        rows = sequences.read(np.arange(first, min(first + 7, sequences.count)))
        assert rows.ends is not None and rows.ends.shape[1] == most + 1
        for inputs, targets, ends in zip(rows.inputs, rows.targets, rows.ends, strict=True):
            assert ends[-1] == T and (np.diff(ends) >= 0).all()
            for a, b in pairwise([0, *ends.tolist()]):
                piece = tuple(inputs[a:b].tolist()), tuple(targets[a:b].tolist())
                if IGNORE in piece[1]:  # padding is a document of its own, the last one of its sequence
                    assert set(piece[1]) == {IGNORE} and b == T
                elif b > a:
                    found.append(piece)
    assert sorted(found) == sorted(pieces_of(texts, bos))


def test_few_positions_are_left_empty(tmp_path: Path) -> None:
    """Lengths as of web text (log-normal, median half a sequence): more than 99 % filled, and stated exactly."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.5, 1.0, 5000).astype(int), 2, None)
    file = token_file(tmp_path, [[*([7] * (n - 1)), EOS] for n in lengths], bos=False)
    sequences = PackedSequences(file, 512)
    assert sequences.max_documents == default_max_documents(512) == 8
    assert sequences.filled > 0.99
    assert sequences.filled == pytest.approx(file.num_tokens / (sequences.count * 512))


def test_short_documents_meet_the_limit(tmp_path: Path) -> None:
    """Documents of 4 positions, at most 2 of them in a sequence of 16: half of it stays empty."""
    sequences = PackedSequences(token_file(tmp_path, [[5, 6, 7, EOS]] * 100, bos=False), T, 2)
    assert (sequences.count, sequences.filled) == (50, 0.5)


def test_batches_have_one_shape_and_the_right_boundaries(tmp_path: Path) -> None:
    sequences = PackedSequences(token_file(tmp_path, documents(False), False), T, 4)
    loader = TrainLoader(sequences, 8, 4, seed=3)
    for step in range(20):
        for micro in range(2):
            batch = loader.batch(step, micro)
            assert batch.input_ids.shape == batch.targets.shape == (1, 4 * T)
            assert batch.cu_seqlens is not None and batch.cu_seqlens.shape == (4 * 5 + 1,)
            offsets = batch.cu_seqlens.tolist()
            assert offsets[0] == 0 and offsets[-1] == 4 * T and offsets == sorted(offsets)
            assert set(range(0, 4 * T + 1, T)) <= set(offsets)  # no document crosses a sequence
            rows = sequences.read(batch.sequence_ids.numpy())
            assert batch.input_ids.flatten().tolist() == rows.inputs.flatten().tolist()


def test_same_global_batch_for_any_layout(tmp_path: Path) -> None:
    sequences = PackedSequences(token_file(tmp_path, documents(False), False), T, 4)
    straight = [TrainLoader(sequences, 8, 8, seed=3).sequence_ids(step, 0).tolist() for step in range(30)]
    for micro_batch, world_size in ((1, 1), (4, 1), (2, 2), (1, 4), (2, 4)):
        loaders = [TrainLoader(sequences, 8, micro_batch, rank, world_size, seed=3) for rank in range(world_size)]
        for step in range(30):
            ids = [
                sequence
                for micro in range(loaders[0].micro_steps)
                for loader in loaders
                for sequence in loader.batch(step, micro).sequence_ids.tolist()
            ]
            assert ids == straight[step]
    first_epoch = [sequence for step in straight for sequence in step][: sequences.count]
    assert sorted(first_epoch) == list(range(sequences.count))[: len(first_epoch)] or len(first_epoch) < sequences.count


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_reads_every_target_once(tmp_path: Path, world_size: int) -> None:
    texts = documents(False)
    sequences = PackedSequences(token_file(tmp_path, texts, False), T, 4)
    loaders = [ValidationLoader(sequences, 3, rank, world_size) for rank in range(world_size)]
    targets = []
    for index in range(loaders[0].num_batches):
        for loader in loaders:
            batch = loader.batch(index)
            targets += batch.targets[batch.targets != IGNORE].tolist()
    assert sorted(targets) == sorted(token for text in texts for token in text)


def test_plan_is_kept_and_made_anew_when_it_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = documents(False)
    file = token_file(tmp_path, texts, False)
    first = PackedSequences(file, T, 4).read(np.arange(5))
    folder = tmp_path / "packing" / f"train-{T}-4"
    assert sorted(path.name for path in folder.iterdir()) == ["lengths.bin", "plan.json", "starts.bin", "windows.bin"]
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_build", lambda *_: pytest.fail("made again"))
        assert np.array_equal(PackedSequences(file, T, 4).read(np.arange(5)).inputs, first.inputs)
    info = json.loads((folder / "plan.json").read_text())
    for change in ({"version": 0}, {"fingerprint": "x"}, {"pieces": info["pieces"] + 1}):
        (folder / "plan.json").write_text(json.dumps({**info, **change}))
        assert np.array_equal(PackedSequences(file, T, 4).read(np.arange(5)).inputs, first.inputs)
        assert json.loads((folder / "plan.json").read_text()) == info
    (folder / "plan.json").write_text("{half")
    assert PackedSequences(file, T, 4).count == info["windows"]
    assert [path.name for path in (tmp_path / "packing").iterdir()] == [folder.name]  # nothing half-made is left


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared token files on a read-only disk: the plan is made for the process, and is the same."""
    file = token_file(tmp_path / "a", documents(False), False)
    kept = PackedSequences(token_file(tmp_path / "b", documents(False), False), T, 4)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    sequences = PackedSequences(file, T, 4)
    assert not (tmp_path / "a" / "packing").exists()
    everything = np.arange(sequences.count)
    assert np.array_equal(sequences.read(everything).inputs, kept.read(everything).inputs)


def test_plan_in_blocks_covers_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BLOCK_DOCUMENTS", 13)
    texts = documents(True)
    sequences = PackedSequences(token_file(tmp_path, texts, True), T, 4)
    rows = sequences.read(np.arange(sequences.count))
    assert sorted(rows.targets[rows.targets != IGNORE].tolist()) == sorted(
        token for text in texts for token in text[1:]
    )


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    file = token_file(tmp_path, [[EOS]], bos=True)
    with pytest.raises(DataError, match="no document with a token to predict"):
        PackedSequences(file, T)
    with pytest.raises(DataError, match=r"data\.max_documents must be at least 1, got 0"):
        PackedSequences(file, T, 0)
    with pytest.raises(DataError, match=r"data\.context must be at least 1"):
        PackedSequences(file, 0)


def test_speed(tmp_path: Path) -> None:
    """20 M tokens/s of processor time, documents of 600 tokens on average in sequences of 2048."""
    import time

    lengths = np.random.default_rng(0).integers(100, 1100, 5000)
    file = token_file(tmp_path, [[*([7] * (n - 1)), EOS] for n in lengths], bos=False)
    loader = TrainLoader(PackedSequences(file, 2048), 32, 8, seed=1)
    loader.batch(0, 0)
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        for step in range(32):
            for micro in range(4):
                loader.batch(step, micro)
        best = max(best, 32 * 32 * 2048 / (time.process_time() - start))
    print(f"{best / 1e6:.0f} M tokens/s")
    assert best > 20e6 and os.path.isdir(tmp_path / "packing")
