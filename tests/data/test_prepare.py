"""From text to token files: the same bytes every time, by any number of processes, after any interruption."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from efla_data.corpus import sources
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
from efla_data.errors import DataError
from efla_data.loader.token_file import TokenFile

from tests.data.material import contents, documents, fingerprints, jsonl, load, many_texts, sentencepiece_folder


@pytest.mark.timeout(120)
def test_same_bytes_on_repeat_and_for_one_and_two_processes(corpus: Recipe, tmp_path: Path) -> None:
    first = prepare(corpus, tmp_path / "one", processes=1)
    assert len(sources.plan_chunks(corpus)) >= 4
    prepare(corpus, tmp_path / "again", processes=1)
    two = prepare(corpus, tmp_path / "two", processes=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "again") == contents(tmp_path / "two")
    assert fingerprints(first) == fingerprints(two)
    assert not list(tmp_path.glob("*.partial"))


def test_documents_keep_their_order_and_the_split_is_by_document(corpus: Recipe, tmp_path: Path) -> None:
    manifest = prepare(corpus, tmp_path / "out", processes=1)
    train, heldout = documents(tmp_path / "out", "train"), documents(tmp_path / "out", "heldout")
    texts = [text for n in range(4) for text in many_texts(60, seed=n)]
    assert [text for text in texts if text in set(train)] == train
    assert [text for text in texts if text in set(heldout)] == heldout
    assert sorted(train + heldout) == sorted(texts)
    assert 0.1 < len(heldout) / len(texts) < 0.3
    assert manifest.skipped == {"bad_json": 3}
    assert [(Path(e["file"]).name, e["record"]) for e in manifest.skipped_examples] == [
        (f"{n}.jsonl", 61) for n in range(3)
    ]
    assert manifest.splits["train"].text_bytes == sum(len(text.encode()) for text in train)


def test_held_out_choice_follows_text_and_seed_not_place(corpus: Recipe, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "a", processes=1)
    folder = Path(corpus.sources[0])
    reverse = Recipe.from_dict(
        {**corpus.to_dict(), "sources": [str(folder / f"{n}.jsonl{'.gz' * (n == 3)}") for n in (3, 2, 1, 0)]}
    )
    prepare(reverse, tmp_path / "b", processes=1)
    assert sorted(documents(tmp_path / "a", "heldout")) == sorted(documents(tmp_path / "b", "heldout"))
    prepare(Recipe.from_dict({**corpus.to_dict(), "split_seed": 7}), tmp_path / "c", processes=1)
    assert set(documents(tmp_path / "a", "heldout")) != set(documents(tmp_path / "c", "heldout"))


def test_held_out_sources(corpus: Recipe, tmp_path: Path) -> None:
    held = str(Path(corpus.sources[0]) / "1.jsonl")
    recipe = Recipe.from_dict({**corpus.to_dict(), "heldout_fraction": None, "heldout_sources": [held]})
    prepare(recipe, tmp_path / "out", processes=1)
    assert documents(tmp_path / "out", "heldout") == many_texts(60, seed=1)
    assert documents(tmp_path / "out", "train") == [text for n in (0, 2, 3) for text in many_texts(60, seed=n)]


def test_trained_tokenizer_never_sees_held_out_text(tmp_path: Path) -> None:
    """A word that only the held-out file has gets no merge of its own."""
    (tmp_path / "train.jsonl").write_bytes(jsonl(many_texts(50)))
    (tmp_path / "heldout.jsonl").write_bytes(jsonl(["zyzzyva " * 500]))
    recipe = Recipe([str(tmp_path / "train.jsonl")], vocab_size=300, heldout_sources=[str(tmp_path / "heldout.jsonl")])
    manifest = prepare(recipe, tmp_path / "out", processes=1)
    assert 258 < manifest.tokenizer.vocab_size <= 300
    vocabulary = load(tmp_path / "out" / "tokenizer").get_vocab()
    assert not any("zy" in entry for entry in vocabulary)
    assert documents(tmp_path / "out", "heldout") == ["zyzzyva " * 500]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("budget", [1, 1000, 2500, 10**9])
def test_token_budget_ends_at_a_document_whoever_is_faster(corpus: Recipe, tmp_path: Path, budget: int) -> None:
    whole = prepare(corpus, tmp_path / "whole", processes=1)
    recipe = Recipe.from_dict({**corpus.to_dict(), "max_tokens": budget, "heldout_fraction": None})
    one = prepare(recipe, tmp_path / "one", processes=1)
    two = prepare(recipe, tmp_path / "two", processes=2)
    assert fingerprints(one) == fingerprints(two)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    train = TokenFile.open(tmp_path / "one", "train", verify=True)
    texts = [text for n in range(4) for text in many_texts(60, seed=n)]
    assert documents(tmp_path / "one", "train") == texts[: train.num_documents]
    if budget < whole.splits["train"].tokens:
        last = len(train.document(train.num_documents - 1))
        assert train.num_tokens - last < budget <= train.num_tokens
    else:
        assert train.num_documents == len(texts)


def test_second_call_returns_at_once_and_other_recipes_are_refused(corpus: Recipe, tmp_path: Path) -> None:
    manifest = prepare(corpus, tmp_path / "out", processes=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert prepare(corpus, tmp_path / "out") == manifest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    with pytest.raises(DataError, match=r"another data\.bos: False, now True; set overwrite=true"):
        prepare(Recipe.from_dict({**corpus.to_dict(), "bos": True}), tmp_path / "out")
    source = Path(corpus.sources[0]) / "2.jsonl"
    os.utime(source, ns=(1, 1))  # another time, the same content: a copy
    assert prepare(corpus, tmp_path / "out") == manifest
    source.write_bytes(source.read_bytes().replace(b"cat", b"dog"))
    with pytest.raises(DataError, match=r"before .*2\.jsonl changed"):
        prepare(corpus, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before  # nothing lost
    changed = prepare(corpus, tmp_path / "out", processes=1, overwrite=True)
    assert fingerprints(changed) != fingerprints(manifest)
    source.unlink()
    with pytest.raises(DataError, match=r"2\.jsonl came or went"):
        prepare(corpus, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text", "tokenizer"]


def test_changed_tokenizer_is_noticed(corpus: Recipe, tmp_path: Path) -> None:
    prepare(corpus, tmp_path / "out", processes=1)
    sentencepiece_folder(Path(corpus.tokenizer), template=False)
    with pytest.raises(DataError, match=r"before tokenizer .* changed"):
        prepare(corpus, tmp_path / "out")


def test_a_folder_of_something_else_is_left_alone(corpus: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(DataError, match="holds no token files"):
            prepare(corpus, tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_links_to_another_disk_are_followed(corpus: Recipe, tmp_path: Path) -> None:
    (tmp_path / "big disk").mkdir()
    (tmp_path / "tokens").symlink_to(tmp_path / "big disk" / "tokens")
    (tmp_path / "big disk" / "tokens").mkdir()
    prepare(corpus, tmp_path / "tokens", processes=1)
    assert (tmp_path / "tokens").is_symlink()
    TokenFile.open(tmp_path / "big disk" / "tokens", verify=True)


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([], {}, "empty corpus: 0 records read"),
        ([{"text": ""}, {"text": " "}], {}, "empty corpus: 2 records read, 0 documents usable, skipped: empty 2"),
        (
            [{"body": "x"}],
            {},
            r"missing_field 1 \(first: .*text\.jsonl record 1, missing_field\); data.text_field is 'text'",
        ),
        ([{"text": "a"}], {"heldout_fraction": 1e-9}, "no held-out document: 1 records read.*raise it"),
        ([{"text": "a"}], {"heldout_fraction": 1 - 1e-9}, "no training document.*lower data.heldout_fraction"),
    ],
)
def test_nothing_to_train_on(
    tmp_path: Path, lines: list[dict[str, str]], options: dict[str, float], message: str
) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=message):
        prepare(Recipe([str(tmp_path / "text.jsonl")], **options), tmp_path / "out", processes=1)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_recipes_that_cannot_be_meant(tmp_path: Path) -> None:
    for options, message in (
        ({"sources": []}, r"data\.sources is empty"),
        ({"sources": ["x"], "heldout_fraction": 1.0}, "expected 0 <= fraction < 1, got 1.0"),
        ({"sources": ["x"], "heldout_fraction": 0.1, "heldout_sources": ["y"]}, "exclude each other"),
        ({"sources": ["x"], "max_tokens": 0}, "expected at least 1 or null, got 0"),
        ({"sources": ["x"], "vocab_size": 257}, "expected 258"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(Recipe(**options), tmp_path / "out")  # type: ignore[arg-type]


def test_manifest_records_where_everything_came_from(corpus: Recipe, tmp_path: Path) -> None:
    import hashlib

    manifest = prepare(corpus, tmp_path / "out", processes=1)
    folder = Path(corpus.sources[0])
    assert [source["path"] for source in manifest.sources] == [str(path) for path in sorted(folder.iterdir())]
    for source in manifest.sources:
        data = Path(source["path"]).read_bytes()
        assert source["sha256"] == hashlib.sha256(data).hexdigest()
        assert source["bytes"] == len(data)
        assert source["documents"] == 60
    assert manifest.recipe == corpus.to_dict()
    found = load(Path(corpus.tokenizer)).to_str(pretty=True)  # the kept copy differs in its start token
    assert manifest.tokenizer.sha256 == hashlib.sha256(found.encode()).hexdigest()
    assert set(manifest.versions) == {"python", "efla-lm", "tokenizers", "numpy"}
