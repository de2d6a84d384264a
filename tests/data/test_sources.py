"""Every kind of source gives the same documents; sources that cannot be read to their end are refused by name."""

from __future__ import annotations

import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from efla_data.corpus import readers, sources
from efla_data.corpus.prepare import prepare
from efla_data.corpus.readers import Tally, read_documents
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.sources import Piece, parse_hub, plan_chunks
from efla_data.errors import DataError

from tests.data.material import documents, jsonl, many_texts, sentencepiece_folder

TEXTS = many_texts(60)


def zstd_frames(data: bytes) -> bytes:
    """Two frames, as `cat a.zst b.zst` makes."""
    half = len(data) // 2
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": lambda data: data,
    ".ndjson": lambda data: data,
    ".jsonl.gz": gzip.compress,
    ".jsonl.xz": lzma.compress,
    ".jsonl.zst": zstd_frames,
}


def write(folder: Path, suffix: str, texts: list[str] = TEXTS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.table({"source": range(len(texts)), "text": texts}), path, row_group_size=7)
    else:
        path.write_bytes(PACKERS[suffix](jsonl(texts)))
    return path


def read(names: list[Path | str], **options: object) -> list[str]:
    """Documents of all pieces, in order."""
    recipe = Recipe([str(name) for name in names], **options)  # type: ignore[arg-type]
    pieces = [piece for chunk in plan_chunks(recipe) for piece in chunk]
    return [text for piece in pieces for text, _ in read_documents(piece, recipe.text_field, Tally())]


@pytest.mark.parametrize("suffix", [*PACKERS, ".parquet"])
def test_every_format(tmp_path: Path, suffix: str) -> None:
    assert read([write(tmp_path, suffix)]) == TEXTS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("target", [1, 37, 500, 10_000])
def test_stretches_of_a_file_hold_each_record_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, target: int
) -> None:
    monkeypatch.setattr(sources, "SMALLEST_CHUNK", target)
    monkeypatch.setattr(sources, "LARGEST_CHUNK", target)
    path = write(tmp_path, suffix, ["the cat", "é" * 30, *TEXTS])
    chunks = plan_chunks(Recipe([str(path)]))
    assert len(chunks) > 1 or target == 10_000
    assert read([path]) == ["the cat", "é" * 30, *TEXTS]


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd_frames}[suffix]
    (tmp_path / f"b.txt{suffix}").write_bytes(pack("\ufeffline one\n\nlinje två\n".encode()))
    (tmp_path / "a.txt").write_bytes(b"first by name")
    assert read([tmp_path]) == ["first by name", "line one\n\nlinje två\n"]


def test_folders_and_globs_are_sorted_and_files_read_once(tmp_path: Path) -> None:
    for name in ("b", "a", "sub/c"):
        write(tmp_path / name, ".jsonl", [f"text of {name}"])
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "notes.md").write_text("no corpus")
    expected = ["text of a", "text of b", "text of sub/c"]
    assert read([tmp_path]) == expected
    assert read([f"{tmp_path}/**/*.jsonl"]) == expected
    assert read([tmp_path / "b" / "part.jsonl", f"{tmp_path}/*/part.jsonl", tmp_path]) == [
        "text of b",
        "text of a",
        "text of sub/c",
    ]


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    write(tmp_path / "x", ".jsonl", ["train"])
    held = write(tmp_path / "y", ".jsonl", ["held out"])
    chunks = plan_chunks(Recipe([str(tmp_path)], heldout_sources=[str(held)]))
    assert [(Path(piece.path).parent.name, piece.heldout) for chunk in chunks for piece in chunk] == [
        ("x", False),
        ("y", True),
    ]
    with pytest.raises(DataError, match="nothing is left to train on"):
        plan_chunks(Recipe([str(held)], heldout_sources=[str(held)]))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "does not exist"),
        ("*.jsonl.gz", "no file of a known kind"),
        ("empty", "no file of a known kind"),
        ("table.csv", "unknown kind"),
        ("packed.parquet.gz", "parquet is compressed inside"),
        ("broken.parquet", "not a readable parquet file"),
    ],
)
def test_sources_that_are_not_there(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("table.csv", "packed.parquet.gz", "broken.parquet"):
        (tmp_path / name).write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=message) as error:
        plan_chunks(Recipe([str(tmp_path / source)]))
    assert str(tmp_path / source) in str(error.value)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.xz", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_damaged_compressed_file_is_named(tmp_path: Path, suffix: str, damage: str) -> None:
    path = write(tmp_path, suffix, many_texts(3000))
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        data = data[:-20]
    else:
        middle = len(data) // 2
        data[middle : middle + 8] = bytes(byte ^ 0x5A for byte in data[middle : middle + 8])
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"truncated or damaged {suffix[7:]} file") as error:
        read([path])
    assert str(path) in str(error.value)


def test_truncated_parquet_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet")
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(DataError, match=r"part\.parquet: not a readable parquet file"):
        read([path])


def test_field_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": pa.array(TEXTS).dictionary_encode(), "n": range(60)}), path)
    assert read([path], text_field="content") == TEXTS
    with pytest.raises(DataError, match=r"no column 'text' \(it has content, n\): set data.text_field"):
        read([path])
    with pytest.raises(DataError, match="should hold strings, holds int64"):
        read([path], text_field="n")


def test_bad_rows_of_parquet_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    bad = pa.array([b"good", b"caf\xe9", None, b"", b"last"]).cast(pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), path)
    tally = Tally()
    piece = plan_chunks(Recipe([str(path)]))[0][0]
    assert [text for text, _ in read_documents(piece, "text", tally)] == ["good", "last"]
    assert tally.skipped == {"bad_utf8": 1, "missing_field": 1, "empty": 1}
    assert [example["record"] for example in tally.examples] == [2, 3, 4]


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.xz", ".jsonl.zst", ".txt.gz"])
def test_a_packed_file_without_bytes_is_no_empty_file(tmp_path: Path, suffix: str) -> None:
    """What a broken download leaves behind; a plain empty file is just one without records."""
    (tmp_path / f"a{suffix}").touch()
    with pytest.raises(DataError, match=r"truncated or damaged \w+ file \(it has no bytes\)"):
        read([tmp_path])
    (tmp_path / f"a{suffix}").unlink()
    (tmp_path / "a.jsonl").touch()
    assert read([tmp_path]) == []


def test_missing_held_out_file_is_named_by_its_key(tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl")
    with pytest.raises(DataError, match=r"data\.heldout_sources: .*nowhere\.jsonl does not exist"):
        plan_chunks(Recipe([str(path)], heldout_sources=[str(tmp_path / "nowhere.jsonl")]))


def test_hub_data_set_is_streamed_shard_by_shard(tmp_path: Path) -> None:
    """A local folder stands in for the hub: `datasets` reads both the same way."""
    for part in range(3):
        write(tmp_path / f"p{part}", ".jsonl.gz", TEXTS[part * 20 : part * 20 + 20])
    chunks = plan_chunks(Recipe([f"hub:{tmp_path}"]))
    assert len(chunks) == 3 and all(len(chunk) == 1 for chunk in chunks)
    assert read([f"hub:{tmp_path}"]) == TEXTS
    with pytest.raises(DataError, match="could not be opened"):
        plan_chunks(Recipe([f"hub:{tmp_path}::test"]))


HUB_CONFIGS = ("slimpajama", "slimpajama_6b", "fineweb_edu", "fineweb_edu_100bt", "wikitext103")


@pytest.mark.parametrize("name", HUB_CONFIGS)
def test_stored_hub_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Each stored recipe, with a local stand-in for the hub: names, splits and columns reach `datasets`, one commit."""
    import huggingface_hub

    from efla_lm.settings import PrepareSettings, compose
    from scripts.prepare import make_recipe

    recipe = make_recipe(compose("prepare", [f"data={name}"], PrepareSettings).data)
    asked: set[tuple[str, ...]] = set()

    def open_stand_in(repository: str, config: str, split: str, revision: str | None) -> object:
        import datasets

        asked.add((repository, config, split, str(revision)))
        rows = {recipe.text_field: [f"{split} {n}" for n in range(6)], "other": list(range(6))}
        return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=3)

    class Hub:
        def dataset_info(self, repository: str) -> object:
            return type("Info", (), {"sha": f"commit of {repository}"})

    for module in (sources, readers):
        monkeypatch.setattr(module, "open_hub", open_stand_in)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    recipe = Recipe.from_dict({**recipe.to_dict(), "tokenizer": str(sentencepiece_folder(tmp_path / "tokenizer"))})
    if recipe.heldout_fraction:
        recipe = Recipe.from_dict({**recipe.to_dict(), "heldout_fraction": 0.5})
    manifest = prepare(recipe, tmp_path / "out", processes=1)
    repository, *config = recipe.sources[0].removeprefix("hub:").split(":")
    expected = {(repository, "".join(config), "train", f"commit of {repository}")}
    if recipe.heldout_sources:
        expected.add((repository, "".join(config), "validation", f"commit of {repository}"))
        assert documents(tmp_path / "out", "heldout") == [f"validation {n}" for n in range(6)]
        assert documents(tmp_path / "out", "train") == [f"train {n}" for n in range(6)]
    assert asked == expected
    assert {source["revision"] for source in manifest.sources} == {f"commit of {repository}"}


def test_stream_that_breaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "the cat"}
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(readers, "open_hub", lambda *_: datasets.IterableDataset.from_generator(rows))
    piece = Piece("hub:org/name::train", "hub", "", False, 0, 0, 0, 1, "abc")
    with pytest.raises(
        DataError, match="hub:org/name::train shard 1 of 1, after 1 rows: reset by peer; finished parts"
    ):
        list(readers.read_documents(piece, "text", readers.Tally()))


def test_hub_names() -> None:
    assert parse_hub("hub:org/name", "train") == ("org/name", "", "train")
    assert parse_hub("hub:org/name:config", "train") == ("org/name", "config", "train")
    assert parse_hub("hub:org/name::validation", "train") == ("org/name", "", "validation")
    for bad in ("hub:", "hub:a:b:c:d"):
        with pytest.raises(DataError, match="expected hub:NAME"):
            parse_hub(bad, "train")


def test_units_do_not_depend_on_anything_but_the_sources(tmp_path: Path) -> None:
    """Small files share a chunk, hub shards and large files do not."""
    for n in range(5):
        write(tmp_path / f"d{n}", ".jsonl.gz")
    assert len(plan_chunks(Recipe([str(tmp_path)]))) == 1
    big = Piece("x", "jsonl", "xz", False, sources.LARGEST_CHUNK * 3, 0)
    assert [len(chunk) for chunk in sources._group([big, big], sources.LARGEST_CHUNK)] == [1, 1]


def test_builtin_corpus() -> None:
    """Its size differs between versions of Python, so only that it is English prose in documents of some length."""
    texts = read(["builtin:pydoc"])
    assert len(texts) > 50
    assert sum(map(len, texts)) > 200_000
    assert sum(text.count(" the ") for text in texts) > 1000
