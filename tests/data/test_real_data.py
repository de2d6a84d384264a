"""With EFLA_SHARED_DATA=FOLDER (corpus/*.jsonl.xz and tokenizer/): the real corpus and the Mistral tokenizer."""

from __future__ import annotations

import json
import lzma
import os
from pathlib import Path

import pytest
from efla_data.corpus.encode import TextEncoder
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.statistics import uniform_entropy, unigram_entropy
from efla_data.corpus.tokenizer import describe_tokenizer, find_tokenizer
from efla_data.loader.token_file import TokenFile

SHARED = os.environ.get("EFLA_SHARED_DATA")
pytestmark = pytest.mark.skipif(SHARED is None, reason="EFLA_SHARED_DATA is not set")


def test_held_out_file_to_known_counts(tmp_path: Path) -> None:
    """33 documents, 2.8 MB of text, about 0.7 M tokens; ids of a documented example."""
    root = Path(str(SHARED))
    files = [str(root / "corpus" / name) for name in ("train-010.jsonl.xz", "heldout.jsonl.xz")]
    recipe = Recipe(files, tokenizer=str(root / "tokenizer"), heldout_sources=files[1:])
    manifest = prepare(recipe, tmp_path / "out")
    heldout = manifest.splits["heldout"]
    assert (heldout.documents, heldout.text_bytes, manifest.tokenizer.vocab_size) == (33, 2841465, 32000)
    assert heldout.tokens == 707526
    assert manifest.splits["train"].documents == 21
    listed = json.loads((root / "corpus" / "manifest.json").read_text())["files"]
    hashes = {entry["file"]: entry["sha256"] for entry in listed}
    assert {Path(source["path"]).name: source["sha256"] for source in manifest.sources} == {
        name: hashes[name] for name in ("train-010.jsonl.xz", "heldout.jsonl.xz")
    }
    train, held = TokenFile.open(tmp_path / "out"), TokenFile.open(tmp_path / "out", "heldout", verify=True)
    assert 5 < unigram_entropy(train, held) < uniform_entropy(train)


def test_mistral_ids_word_by_word() -> None:
    """Equal to the tokenizer's own on whole documents of the corpus."""
    root = Path(str(SHARED))
    loaded = find_tokenizer(str(root / "tokenizer"))
    info = describe_tokenizer(loaded, add_bos=True)
    quick, whole = TextEncoder(loaded.backend, info), TextEncoder(loaded.backend, info, quick=False)
    assert quick.quick is not None
    sentence = "The capital of France is Paris."
    assert quick.encode(sentence).tolist() == [1, 415, 5565, 302, 4843, 349, 5465, 28723, 2]
    with lzma.open(root / "corpus" / "heldout.jsonl.xz") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for text in texts[:12]:
        assert quick.encode(text[:50_000]).tolist() == whole.encode(text[:50_000]).tolist()
