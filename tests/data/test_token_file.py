"""Opening token files: what is missing, cut off or altered is found and named; size costs nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from efla_data.corpus.manifest import load_manifest, make_split
from efla_data.corpus.writer import write_token_files
from efla_data.errors import DataError
from efla_data.loader.batches import TrainLoader
from efla_data.loader.packed import PackedSequences
from efla_data.loader.sequences import StreamSequences
from efla_data.loader.token_file import TokenFile

DOCUMENTS = {"train": [[5, 6, 7, 1], [8, 1], [9, 9, 9, 9, 1]], "heldout": [[5, 1]]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_token_files(tmp_path, DOCUMENTS, vocab_size=10, eos_id=1)
    return tmp_path


def test_round_trip(folder: Path) -> None:
    file = TokenFile.open(folder, "train", verify=True)
    assert (file.num_tokens, file.num_documents, file.vocab_size) == (11, 3, 10)
    assert file.tokens.dtype == np.dtype("<u2")
    assert [file.document(n).tolist() for n in range(3)] == DOCUMENTS["train"]
    assert file.document_ends.tolist() == [4, 6, 11]
    assert file.fingerprint != TokenFile.open(folder, "heldout").fingerprint
    for number in (-1, 3):
        with pytest.raises(IndexError, match="expected 0 <= index < 3"):
            file.document(number)


def test_bytes_on_disk_are_little_endian(folder: Path) -> None:
    """The format, written out."""
    assert (folder / "heldout-00000.bin").read_bytes() == b"\x05\x00\x01\x00"
    assert (folder / "heldout-00000.idx").read_bytes() == b"\x02\x00\x00\x00\x00\x00\x00\x00"


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    for vocab_size, dtype in ((65536, "<u2"), (65537, "<u4")):
        out = tmp_path / str(vocab_size)
        write_token_files(out, {"train": [[vocab_size - 1, 0]]}, vocab_size, eos_id=0)
        file = TokenFile.open(out, verify=True)
        assert file.tokens.dtype == np.dtype(dtype) and file.tokens[0] == vocab_size - 1


def test_fingerprint_is_of_content_alone(folder: Path, tmp_path: Path) -> None:
    def fingerprint(documents: list[list[int]], vocab_size: int = 10) -> str:
        out = tmp_path / "other"
        write_token_files(out, {"train": documents}, vocab_size, eos_id=1)
        return TokenFile.open(out).fingerprint

    same = fingerprint(DOCUMENTS["train"])
    assert same == TokenFile.open(folder).fingerprint
    assert fingerprint(DOCUMENTS["train"][::-1]) != same
    assert fingerprint([[5, 6, 7, 1, 8, 1], [9, 9, 9, 9, 1]]) != same  # the same stream, another boundary
    assert fingerprint(DOCUMENTS["train"], vocab_size=11) != same


def test_altered_file_is_found_by_its_hash(folder: Path) -> None:
    for name in ("train-00000.bin", "train-00000.idx"):
        data = bytearray((folder / name).read_bytes())
        data[0] ^= 1
        (folder / name).write_bytes(data)
        TokenFile.open(folder)  # the size is right: only a full read can tell
        with pytest.raises(DataError, match=rf"{name}: corrupt, expected sha256 [0-9a-f]{{64}}, got [0-9a-f]{{64}}"):
            TokenFile.open(folder, verify=True)
        data[0] ^= 1
        (folder / name).write_bytes(data)
    TokenFile.open(folder, verify=True)


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx"])
@pytest.mark.parametrize("size", [0, 1, -1, +2])
def test_truncated_or_grown_file_is_found_on_plain_open(folder: Path, name: str, size: int) -> None:
    full = (folder / name).stat().st_size
    os.truncate(folder / name, size if size in (0, 1) else full + size)
    with pytest.raises(DataError, match=rf"{name}: truncated or altered, expected {full} bytes, got"):
        TokenFile.open(folder)


def test_missing_files(folder: Path) -> None:
    with pytest.raises(DataError, match=r"no token files in .*nowhere.*scripts\.prepare"):
        TokenFile.open(folder / "nowhere")
    (folder / "train-00000.idx").unlink()
    with pytest.raises(DataError, match=r"missing token file .*train-00000\.idx"):
        TokenFile.open(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"manifest\.json is missing"):
        TokenFile.open(folder)


def test_missing_split(tmp_path: Path) -> None:
    write_token_files(tmp_path, {"train": [[1]]}, 10, eos_id=1)
    with pytest.raises(DataError, match=r"no split 'heldout' \(it has: train\)"):
        TokenFile.open(tmp_path, "heldout")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: raw["splits"]["train"]["shards"][0].update(tokens_sha256="0" * 64),
            "fingerprint of 'train' should be",
        ),
        (lambda raw: raw["tokenizer"].update(vocab_size=9), "fingerprint of 'train' should be"),
        (lambda raw: raw.update(schema=99), "schema 99, this version reads 1"),
        (lambda raw: raw.update(format="other"), "not a manifest of token files"),
        (lambda raw: raw["splits"]["train"].pop("tokens"), "damaged manifest"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(tokens_file=[]), "tokens_file should be of type str"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(tokens="x"), "tokens should be of type int"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(documents=-1), "documents should be of type int"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(tokens=True), "tokens should be of type int"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(index_file="../x"), "should be a file of this folder"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(tokens_file="/etc/passwd"), "a file of this folder"),
        (lambda raw: raw["splits"]["train"]["shards"][0].update(tokens_file=".."), "a file of this folder"),
        (lambda raw: raw["splits"]["train"].update(shards=None), "damaged manifest"),
        (lambda raw: raw["splits"].update(train=None), "damaged manifest"),
        (lambda raw: raw.update(dtype="O"), "dtype should be one of"),
        (lambda raw: raw.update(dtype=None), "dtype should be one of"),
        (lambda raw: raw["tokenizer"].update(vocab_size=None), "vocab_size should be of type int"),
        (lambda raw: raw["tokenizer"].update(eos_id=10), "below vocab_size 10"),
        (lambda raw: raw.update(extra=1), "damaged manifest"),
    ],
)
def test_altered_manifest(folder: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    raw = json.loads((folder / "manifest.json").read_text())
    change(raw)
    (folder / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(DataError, match=message):
        TokenFile.open(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_unreadable_manifest(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(DataError, match=r"manifest\.json"):
        TokenFile.open(folder)


def test_index_of_another_file_is_refused(folder: Path) -> None:
    ends = np.array([4, 6, 10], dtype="<u8")
    (folder / "train-00000.idx").write_bytes(ends.tobytes())
    with pytest.raises(DataError, match="last document should end at token 11, ends at 10"):
        TokenFile.open(folder)


def test_too_small_a_model_can_be_refused(folder: Path) -> None:
    file = TokenFile.open(folder)
    file.check_vocabulary(10)
    with pytest.raises(DataError, match=r"has 10 ids, the model has vocab_size=9"):
        file.check_vocabulary(9)


@pytest.mark.parametrize("document", [[], [5], [5, 10, 1], [-1, 1], [1, 5]])
def test_writer_refuses_ids_that_break_the_format(tmp_path: Path, document: list[int]) -> None:
    with pytest.raises(DataError, match=r"train document 0: expected ids in 0\.\.9 with 1 \(EOS\) last"):
        write_token_files(tmp_path, {"train": [document]}, vocab_size=10, eos_id=1)


HUGE = """
import resource, sys, time
import numpy as np
from efla_data.loader.batches import TrainLoader
from efla_data.loader.token_file import TokenFile
from efla_data.loader.sequences import StreamSequences
start = time.monotonic()
file = TokenFile.open(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loader = TrainLoader(StreamSequences(file, 2048, mask_boundaries=True), 256, 16, seed=1)
for step in (0, 10**4, 10**6):
    assert loader.batch(step, 3).input_ids.shape == (16, 2048)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(file.num_tokens, (after - before) / 1024, time.monotonic() - start)
"""


@pytest.mark.parametrize("shards", [1, 25])
def test_fifty_billion_tokens_cost_no_memory(tmp_path: Path, shards: int) -> None:
    """Sparse files of the paper's size: open, read at step one million, in seconds and a few MiB."""
    manifest = write_token_files(tmp_path, {"train": [[1]]}, 32000, eos_id=1)
    # holes in the index of a single shard read as document ends at 0, which are before every sequence; with several
    # shards the holes would be in the middle, so those have fewer documents, all with their ends
    tokens, documents = 50_000_000_000, 50_000_000 if shards == 1 else 50_000
    shard = dataclasses.replace(
        manifest.splits["train"].shards[0], tokens=tokens // shards, documents=documents // shards
    )
    parts = []
    for number in range(shards):
        names = f"train-{number:05d}.bin", f"train-{number:05d}.idx"
        parts.append(dataclasses.replace(shard, tokens_file=names[0], index_file=names[1]))
        try:
            with open(tmp_path / names[0], "wb") as handle:
                handle.truncate(2 * shard.tokens)
        except OSError:
            pytest.skip("this file system has no sparse files of 100 GB")
        with open(tmp_path / names[1], "wb") as handle:
            handle.truncate(8 * shard.documents)
            ends = [shard.tokens] if shards == 1 else np.linspace(0, shard.tokens, shard.documents + 1)[1:]
            handle.seek(8 * (shard.documents - len(ends)))
            handle.write(np.array(ends, dtype="<u8").tobytes())
    split = make_split(manifest.dtype, manifest.tokenizer, parts)
    dataclasses.replace(manifest, splits={"train": split}).save(tmp_path)
    assert load_manifest(tmp_path).splits["train"].tokens == tokens
    done = subprocess.run(
        [sys.executable, "-c", HUGE, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    count, mebibytes, seconds = map(float, done.stdout.split())
    assert count == tokens
    assert mebibytes < 100
    assert seconds < 5


def damage(path: Path, dtype: str, index: int, value: int) -> None:
    numbers = np.fromfile(path, dtype)
    numbers[index] = value
    numbers.tofile(path)


def loaders(folder: Path) -> dict[str, Callable[[], TrainLoader]]:
    file = TokenFile.open(folder)
    return {
        "stream": lambda: TrainLoader(StreamSequences(file, 2), 1, 1, shuffle=False),
        "masked": lambda: TrainLoader(StreamSequences(file, 2, mask_boundaries=True), 1, 1, shuffle=False),
        "packed": lambda: TrainLoader(PackedSequences(file, 5), 1, 1, shuffle=False),
    }


@pytest.mark.parametrize("kind", ["stream", "masked", "packed"])
def test_an_id_beyond_the_vocabulary_is_named_with_its_file_and_step(folder: Path, kind: str) -> None:
    damage(folder / "train-00000.bin", "<u2", 7, 10)
    loader = loaders(folder)[kind]()
    found = []
    for step in range(loader.sequences.count):
        try:
            batch = loader.batch(step, 0)
            assert batch.input_ids.max() < 10 and batch.targets.max() < 10
        except DataError as error:
            found.append(step)
            assert str(error).startswith(f"batch of step {step}: {folder / 'train-00000.bin'}: damaged, token id 10 at")
    assert found


@pytest.mark.parametrize("value", [0, 3, 12, 1 << 35, (1 << 63) - 1, (1 << 64) - 1])
def test_a_wrong_document_end_is_one_error(folder: Path, value: int) -> None:
    """Not an allocation of many GiB."""
    damage(folder / "train-00000.idx", "<u8", 1, value)
    file = TokenFile.open(folder)
    with pytest.raises(DataError, match=r"damaged index \(\*\.idx\), document"):
        for number in range(3):
            file.document(number)
    with pytest.raises(DataError, match=r"damaged index \(\*\.idx\), document"):
        loaders(folder)["packed"]()
    masked = loaders(folder)["masked"]()
    for step in range(masked.sequences.count):
        with contextlib.suppress(DataError):
            masked.batch(step, 0)


def test_a_damaged_plan_of_packed_documents_is_one_error(folder: Path) -> None:
    assert loaders(folder)["packed"]().batch(0, 0)
    (lengths,) = folder.glob("packing/*/lengths.bin")
    damage(lengths, "<u4", 0, 1 << 31)
    loader = loaders(folder)["packed"]()
    with pytest.raises(DataError, match="damaged plan of packed documents"):
        for step in range(loader.sequences.count):
            loader.batch(step, 0)
