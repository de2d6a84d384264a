"""A split of several shards reads as the same split in one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from efla_data.corpus.manifest import load_manifest, make_split
from efla_data.corpus.statistics import count_tokens
from efla_data.corpus.writer import write_token_files
from efla_data.errors import DataError
from efla_data.loader.batches import TrainLoader, ValidationLoader
from efla_data.loader.concatenated import ConcatenatedArray, count_below
from efla_data.loader.packed import PackedSequences
from efla_data.loader.sequences import StreamSequences
from efla_data.loader.token_file import TokenFile

EOS, VOCAB = 0, 100


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenFile, TokenFile]:
    """(one shard, four shards) of the same documents."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    texts = [[*rng.integers(1, VOCAB, rng.integers(0, 30)).tolist(), EOS] for _ in range(60)]
    write_token_files(folder / "one", {"train": texts}, VOCAB, EOS)
    parts = []
    for number, (a, b) in enumerate([(0, 1), (1, 20), (20, 21), (21, 60)]):
        single = write_token_files(folder / f"part{number}", {"train": texts[a:b]}, VOCAB, EOS)
        shard = single.splits["train"].shards[0]
        names = {}
        for key in ("tokens_file", "index_file"):
            names[key] = getattr(shard, key).replace("00000", f"{number:05d}")
            (folder / "four").mkdir(exist_ok=True)
            (folder / f"part{number}" / getattr(shard, key)).rename(folder / "four" / names[key])
        parts.append(dataclasses.replace(shard, **names))
    split = make_split(single.dtype, single.tokenizer, parts)
    dataclasses.replace(single, splits={"train": split}).save(folder / "four")
    return TokenFile.open(folder / "one", verify=True), TokenFile.open(folder / "four", verify=True)


def test_tokens_and_documents(files: tuple[TokenFile, TokenFile]) -> None:
    one, four = files
    assert isinstance(four.tokens, ConcatenatedArray) and not isinstance(one.tokens, ConcatenatedArray)
    assert (four.num_tokens, four.num_documents) == (one.num_tokens, one.num_documents)
    assert four.tokens.tolist() == one.tokens.tolist()
    assert four.document_ends.tolist() == one.document_ends.tolist()
    for index in range(one.num_documents):
        assert four.document(index).tolist() == one.document(index).tolist()
    for start in range(0, one.num_tokens + 3, 5):
        for stop in (start - 3, start, start + 1, start + 40, one.num_tokens):
            assert four.tokens[max(start, 0) : max(stop, 0)].tolist() == one.tokens[start : max(stop, 0)].tolist()
    places = np.arange(one.num_tokens + 5)
    for inclusive in (False, True):
        expected = np.searchsorted(one.document_ends[:], places, side="right" if inclusive else "left")
        assert count_below(four.document_ends, places, inclusive).tolist() == expected.tolist()
    assert count_tokens(four, 1).tolist() == count_tokens(one, 1).tolist()


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("context", [3, 16, 50])
def test_sequences_cross_shards(files: tuple[TokenFile, TokenFile], mask: bool, context: int) -> None:
    loaders = [TrainLoader(StreamSequences(file, context, mask), 4, 4, seed=1) for file in files]
    for step in range(30):
        one, four = (loader.batch(step, 0) for loader in loaders)
        assert one.input_ids.tolist() == four.input_ids.tolist() and one.targets.tolist() == four.targets.tolist()
    validation = [ValidationLoader(StreamSequences(file, context, mask, tail=True), 4) for file in files]
    for index in range(validation[0].num_batches):
        one, four = (loader.batch(index) for loader in validation)
        assert one.input_ids.tolist() == four.input_ids.tolist() and one.targets.tolist() == four.targets.tolist()


def test_packed_documents(files: tuple[TokenFile, TokenFile]) -> None:
    one, four = (PackedSequences(file, 16, 4) for file in files)
    rows = one.read(np.arange(one.count)), four.read(np.arange(four.count))
    assert rows[0].inputs.tolist() == rows[1].inputs.tolist() and rows[0].targets.tolist() == rows[1].targets.tolist()


def test_missing_or_cut_shard_is_named(files: tuple[TokenFile, TokenFile], tmp_path: Path) -> None:
    for path in files[1].folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "train-00002.bin").write_bytes((tmp_path / "train-00002.bin").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00002\.bin: truncated or altered"):
        TokenFile.open(tmp_path)
    (tmp_path / "train-00002.bin").unlink()
    with pytest.raises(DataError, match=r"missing token file .*train-00002\.bin"):
        TokenFile.open(tmp_path)
    manifest = load_manifest(tmp_path)
    empty = {"train": make_split(manifest.dtype, manifest.tokenizer, [])}
    dataclasses.replace(manifest, splits=empty).save(tmp_path)
    with pytest.raises(DataError, match="split 'train' has no shard"):
        TokenFile.open(tmp_path)
    assert json.loads((tmp_path / "manifest.json").read_text())["splits"]["train"]["shards"] == []
