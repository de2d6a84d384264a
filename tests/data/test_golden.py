"""The golden token stream: every kind of odd document, with a tokenizer whose every id is known."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.tokenizer import find_tokenizer, save_tokenizer
from efla_data.loader.batches import IGNORE, ValidationLoader
from efla_data.loader.packed import PackedSequences
from efla_data.loader.token_file import TokenFile

from tests.data.material import BOS, EOS, SPACE, ids_of, load, save_rules, sentencepiece_folder, sentencepiece_rules

RULES = sentencepiece_rules()
LONG = "the cat " * 500

# one line of the file, and what it must become: ids without BOS and EOS, or the reason why it is skipped
LINES: list[tuple[bytes, list[int] | str | None]] = [
    (json.dumps({"text": "the cat"}).encode(), ids_of(RULES, SPACE + "the", SPACE + "cat")),
    (json.dumps({"text": ""}).encode(), "empty"),
    (json.dumps({"text": "  \n"}).encode(), "empty"),
    (json.dumps({"text": "\u00a0\t\r\n"}).encode(), "empty"),
    (json.dumps({"text": "x"}).encode(), ids_of(RULES, SPACE, "x")),
    (b"", None),  # an empty line is no record
    (json.dumps({"text": " a"}).encode(), ids_of(RULES, SPACE, SPACE + "a")),  # the merge with "a" comes first
    (json.dumps({"text": "  x "}).encode(), ids_of(RULES, SPACE + SPACE, SPACE, "x", SPACE)),
    (json.dumps({"text": "a\n\nthe"}).encode(), ids_of(RULES, SPACE + "a", b"\n\n", "the")),
    (b'{"text": "caf\xe9"}', "bad_utf8"),
    (b'{"text": "a\xed\xa0\x80"}', "bad_utf8"),
    (b'{"text": "a \\ud800 b"}', "bad_unicode"),
    (b'{"text": "never closed', "bad_json"),
    (b'["the"]', "bad_json"),
    (b"[" * 100_000, "bad_json"),
    (b'{"body": "the cat"}', "missing_field"),
    (b'{"text": null}', "missing_field"),
    (b'{"text": 17}', "not_text"),
    (
        json.dumps({"text": "a </s> b<s>"}).encode(),
        ids_of(RULES, SPACE + "a", SPACE, *"</s>", SPACE, "b", *"<s>"),
    ),
    ('{"text": "é 😀"}'.encode(), ids_of(RULES, SPACE, "é".encode(), SPACE, "😀".encode())),
    (json.dumps({"text": "a\x00a"}).encode(), ids_of(RULES, SPACE + "a", b"\x00", "a")),
    (json.dumps({"text": LONG}).encode(), ids_of(RULES, *[SPACE + "the", SPACE + "cat"] * 500, SPACE)),
    (b'{"text": "at\\r\\n"}\r', ids_of(RULES, SPACE + "a", "t", b"\r\n")),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    sentencepiece_folder(folder / "tokenizer")
    lines = [line for line, _ in LINES]
    (folder / "odd.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines) + b'\n{"text": "the"}')  # no line feed last
    return folder


def expected(bos: bool) -> list[list[int]]:
    documents = [ids for _, ids in LINES if isinstance(ids, list)] + [ids_of(RULES, SPACE + "the")]
    return [([BOS] if bos else []) + ids + [EOS] for ids in documents]


@pytest.mark.parametrize("bos", [False, True])
def test_golden_stream(corpus: Path, tmp_path: Path, bos: bool) -> None:
    """Documents in order, special tokens as configured and nowhere else, whatever the tokenizer's template puts."""
    recipe = Recipe([str(corpus / "odd.jsonl")], tokenizer=str(corpus / "tokenizer"), bos=bos)
    manifest = prepare(recipe, tmp_path / "out", processes=1)
    file = TokenFile.open(tmp_path / "out", verify=True)
    got = [file.document(number).tolist() for number in range(file.num_documents)]
    assert got == expected(bos)
    assert file.tokens.tolist() == [token for document in got for token in document]
    for document in got:
        assert document.count(EOS) == 1 and document[-1] == EOS
        assert document.count(BOS) == int(bos) and (not bos or document[0] == BOS)
    assert manifest.tokenizer.vocab_size == len(RULES["model"]["vocab"])
    assert (manifest.tokenizer.bos_id, manifest.tokenizer.eos_id, manifest.tokenizer.add_bos) == (BOS, EOS, bos)


def test_what_was_skipped_is_counted_and_named(corpus: Path, tmp_path: Path) -> None:
    recipe = Recipe([str(corpus / "odd.jsonl")], tokenizer=str(corpus / "tokenizer"))
    manifest = prepare(recipe, tmp_path / "out", processes=1)
    reasons = [(number, why) for number, (_, why) in enumerate(LINES, start=1) if isinstance(why, str)]
    assert manifest.skipped == {why: [w for _, w in reasons].count(why) for _, why in reasons}
    named = [(example["record"], example["reason"]) for example in manifest.skipped_examples]
    assert named == reasons
    assert {example["file"] for example in manifest.skipped_examples} == {str(corpus / "odd.jsonl")}
    source = manifest.sources[0]
    assert source["documents"] == manifest.splits["train"].documents == len(expected(False))
    assert source["records"] == len(LINES) + 1


def test_text_bytes_are_those_of_the_text(corpus: Path, tmp_path: Path) -> None:
    recipe = Recipe([str(corpus / "odd.jsonl")], tokenizer=str(corpus / "tokenizer"))
    manifest = prepare(recipe, tmp_path / "out", processes=1)
    texts = [json.loads(line)["text"] for line, ids in LINES if isinstance(ids, list)] + ["the"]
    assert manifest.splits["train"].text_bytes == sum(len(text.encode()) for text in texts)


def test_the_same_file_twice_without_duplicates(corpus: Path, tmp_path: Path) -> None:
    """Odd documents that differ in a space alone are different ones; a second copy of the file adds nothing."""
    again = corpus / "again.jsonl"
    again.write_bytes((corpus / "odd.jsonl").read_bytes())
    sources = [str(corpus / "odd.jsonl"), str(again)]
    recipe = Recipe(sources, tokenizer=str(corpus / "tokenizer"), deduplicate=True)
    manifest = prepare(recipe, tmp_path / "out", processes=1)
    file = TokenFile.open(tmp_path / "out", verify=True)
    assert [file.document(number).tolist() for number in range(file.num_documents)] == expected(False)
    assert manifest.skipped["duplicate"] == len(expected(False))
    assert manifest.skipped["empty"] == 2 * sum(why == "empty" for _, why in LINES)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("context", [7, 64])
def test_golden_sequences_of_whole_documents(corpus: Path, tmp_path: Path, bos: bool, context: int) -> None:
    """Row C19: each document once, opened by BOS or EOS, closed by EOS, cut where it is longer than the context."""
    recipe = Recipe([str(corpus / "odd.jsonl")], tokenizer=str(corpus / "tokenizer"), bos=bos)
    prepare(recipe, tmp_path / "out", processes=1)
    wanted = []
    for document in expected(bos):
        sequence = document if bos else [EOS, *document]
        for start in range(0, len(sequence) - 1, context):
            piece = sequence[start : start + context + 1]
            wanted.append((piece[:-1], piece[1:]))
    assert len(wanted) >= len(expected(bos)) + 1000 // context
    loader = ValidationLoader(PackedSequences(TokenFile.open(tmp_path / "out"), context), 4)
    got = []
    for index in range(loader.num_batches):
        batch = loader.batch(index)
        assert batch.cu_seqlens is not None
        for a, b in pairwise(batch.cu_seqlens.tolist()):
            inputs, targets = batch.input_ids[0, a:b].tolist(), batch.targets[0, a:b].tolist()
            if targets and targets != [IGNORE] * len(targets):
                got.append((inputs, targets))
    assert sorted(got) == sorted(wanted)


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_kept_tokenizer_gives_the_ids_of_training(corpus: Path, tmp_path: Path, bos: bool, template: bool) -> None:
    """transformers loads it, gives the same ids with the same start, whatever the source's template adds, and turns
    them back into the text. Without BOS in training it names none: lm-eval then takes EOS as the token before a text.
    """
    from transformers import AutoTokenizer

    source = sentencepiece_folder(tmp_path / "source", template=template)
    prepare(Recipe([str(corpus / "odd.jsonl")], tokenizer=str(source), bos=bos), tmp_path / "out", processes=1)
    file = TokenFile.open(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(file.tokenizer_dir)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS if bos else None, EOS)
    assert len(tokenizer) == len(RULES["model"]["vocab"])
    texts = [json.loads(line)["text"] for line, ids in LINES if isinstance(ids, list) and b"</s>" not in line]
    documents = [ids for ids in expected(bos) if ids.count(ids_of(RULES, "<")[0]) == 0]
    assert [[*ids, EOS] for ids in tokenizer(texts).input_ids] == documents[: len(texts)]
    assert tokenizer("the cat", "a").input_ids.count(BOS) == int(bos)
    bare = ids_of(RULES, SPACE + "the", SPACE + "cat")
    assert tokenizer("the cat", add_special_tokens=False).input_ids == bare
    assert tokenizer.decode(file.document(0), skip_special_tokens=True) == "the cat"


def test_the_start_rule_replaces_every_kind_of_template(tmp_path: Path) -> None:
    """BERT's and RoBERTa's rules and templates within a sequence add tokens as well; offsets' rules stay."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    ends = {"sep": ["</s>", EOS], "cls": ["<s>", BOS]}
    for given, kept in [
        (RULES["post_processor"], None),
        ({"type": "BertProcessing", **ends}, None),
        ({"type": "RobertaProcessing", **ends, "trim_offsets": True, "add_prefix_space": False}, None),
        ({"type": "Sequence", "processors": [byte_level, RULES["post_processor"]]}, byte_level),
        (None, None),
    ]:
        save_rules(tmp_path / "source", {**RULES, "post_processor": given}, bos_token="<s>", eos_token="</s>")
        loaded = find_tokenizer(str(tmp_path / "source"))
        for bos in (False, True):
            save_tokenizer(loaded, tmp_path / "kept", bos)
            backend = load(tmp_path / "kept")
            bare = backend.encode("the cat", add_special_tokens=False).ids
            assert backend.encode("the cat").ids == ([BOS] if bos else []) + bare
            if not bos:
                assert json.loads(backend.to_str())["post_processor"] == kept
