"""The contamination report against a plain comparison, and what it says of odd files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from efla_data.corpus.contamination import contamination_report
from efla_data.corpus.ngrams import GramSet, ngram_hashes, normalised_words
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
from efla_data.errors import DataError

from scripts.contamination import main as contamination
from tests.data.material import jsonl, sentencepiece_folder

N = 5


def words(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("abcdefghij"), 3)) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tokens/ of 300 documents, and eval/ with examples of which some stand in them, with other marks and capitals."""
    folder = tmp_path_factory.mktemp("contamination")
    corpus = [words(int(np.random.default_rng(n).integers(3, 60)), n) for n in range(300)]
    (folder / "text.jsonl").write_bytes(jsonl(" ".join(text) for text in corpus))
    tokenizer = sentencepiece_folder(folder / "tokenizer")
    prepare(Recipe([str(folder / "text.jsonl")], tokenizer=str(tokenizer), bos=True), folder / "tokens", processes=1)
    long = [n for n, text in enumerate(corpus) if len(text) >= 20]
    examples = []
    for n in range(40):
        own = words(30, 1000 + n)
        if n % 4 == 1:  # touched by exactly N words
            own[10 : 10 + N] = corpus[long[n]][7 : 7 + N]
        if n % 4 == 2:  # one word short
            own[10 : 10 + N - 1] = corpus[long[n]][7 : 7 + N - 1]
        text = ", ".join(word.upper() if n % 2 else word for word in own)
        examples.append({"id": n, "question": f"({text})!", "choices": [{"text": "x y"}, text[:9]], "answer": None})
    examples.append({"question": "too short", "choices": []})
    # an n-gram across two strings of a record is none
    examples.append({"a": " ".join(corpus[long[0]][:3]), "b": " ".join(corpus[long[0]][3:6])})
    (folder / "eval").mkdir()
    (folder / "eval" / "one.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, examples)).encode()))
    (folder / "eval" / "two.txt").write_text(" ".join(corpus[long[-1]]))
    (folder / "eval" / "readme.md").write_text("not a task")
    return folder


@pytest.mark.timeout(120)
def test_touched_examples_are_found(folder: Path) -> None:
    report = contamination_report(folder / "tokens", [str(folder / "eval")], n=N, processes=2)
    one, two = report["tasks"]
    assert (one["examples"], one["too_short"], one["touched"]) == (42, 2, 10)
    assert one["share"] == 10 / 40
    assert [example["record"] for example in one["first"]] == [n + 1 for n in range(40) if n % 4 == 1]
    corpus = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    for example in one["first"]:
        assert len(example["words"].split()) == N and example["found"] == 1 and example["ngrams"] == 26
        holders = [n for n, text in enumerate(corpus) if example["words"] in text]
        assert example["document"] == holders[0]
    assert (two["examples"], two["touched"], two["first"][0]["record"]) == (1, 1, 1)
    assert report["corpus"]["words"] == sum(len(text.split()) for text in corpus)
    assert report["corpus"]["documents"] == 300
    assert report["ngrams_found"] == 10 + two["first"][0]["found"]
    assert report == contamination_report(folder / "tokens", [str(folder / "eval")], n=N, processes=1)


def test_hashes_tell_sequences_apart() -> None:
    """All 3-grams over a small alphabet of words: equal hashes for equal n-grams and for no others."""
    text = ["a", "b", "c"] * 2 + list(np.random.default_rng(0).choice(list("abcd"), 3000))
    hashes = ngram_hashes(text, 3)
    grams = [tuple(text[i : i + 3]) for i in range(len(text) - 2)]
    assert len(hashes) == len(grams) and len(set(hashes.tolist())) == len(set(grams)) == 64
    assert hashes[0] == hashes[3]
    assert len(ngram_hashes(text[:2], 3)) == 0
    known = GramSet(np.unique(hashes[:10]))
    assert sorted(set(known.find(hashes).tolist())) == list(range(len(known.grams)))
    assert len(GramSet(np.empty(0, np.uint64)).find(hashes)) == 0


def test_words() -> None:
    assert normalised_words("The CAT's, e-mail: straße_2 -- Ünïcode…") == [
        "the", "cat", "s", "e", "mail", "strasse", "2", "ünïcode",
    ]  # fmt: skip


@pytest.mark.timeout(120)
def test_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    where = [f"data.dir={folder / 'tokens'}", f"tasks=[{folder / 'eval'}]", f"n={N}", "processes=1"]
    assert contamination.run(["data=local", *where]) == 0
    out = capsys.readouterr().out
    assert "      10      40  25.00%          2  one.jsonl.gz" in out and "record 2, 1 of 26: '" in out
    report = json.loads((tmp_path / "results" / "contamination-local.json").read_text())
    assert report["tasks"][0]["touched"] == 10
    assert (tmp_path / "results" / "contamination-local.txt").read_text() in out


def test_what_cannot_be_read_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{half\n')
    for tasks, words_ in (
        (str(tmp_path / "nothing"), "tasks: .*nothing does not exist$"),
        (str(tmp_path / "bad.jsonl"), r"bad\.jsonl: line 2 is no JSON"),
    ):
        with pytest.raises(DataError, match=words_):
            contamination_report(folder / "tokens", [tasks], n=N)
    with pytest.raises(DataError, match="tasks is empty"):
        contamination_report(folder / "tokens", [])
    with pytest.raises(DataError, match="at least 1 word, got 0"):
        contamination_report(folder / "tokens", [str(folder / "eval")], n=0)
    assert contamination.run([f"data.dir={folder / 'tokens'}"]) == 1
    assert "tasks is empty" in capsys.readouterr().err
    assert contamination.run([f"data.dir={tmp_path}", f"tasks=[{folder / 'eval'}]"]) == 1
    assert "no token files in" in capsys.readouterr().err
