"""Tokenizers, odd documents and token files that the tests of data share. Made here, nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from efla_data.corpus.manifest import Manifest
from efla_data.corpus.writer import write_token_files
from efla_data.loader.token_file import TokenFile
from tokenizers import Tokenizer

SPACE = "\u2581"
MERGES = [
    ("h", "e"),
    ("t", "he"),
    (SPACE, "the"),
    (SPACE, "a"),
    ("a", "t"),
    ("c", "at"),
    (SPACE, "cat"),
    (SPACE, SPACE),
]
LETTERS = [SPACE, *"abcdefghijklmnopqrstuvwxyz.<>/"]
UNK, BOS, EOS = 0, 1, 2


def sentencepiece_rules(merges: Sequence[tuple[str, str]] = MERGES, template: bool = True) -> dict[str, Any]:
    """A tokenizer.json as Llama's and Mistral's are: bytes 3..258, then letters, then merges; its template puts BOS."""
    entries = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    entries += [a + b for a, b in merges]
    ids = {entry: index for index, entry in enumerate(entries)}
    special = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    bos, text = {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": entries[i], **special} for i in (UNK, BOS, EOS)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, text] if template else [text],
            "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [list(merge) for merge in merges],
        },
    }


def save_rules(folder: Path, rules: dict[str, Any], **special: str) -> Path:
    """A tokenizer folder: tokenizer.json, and tokenizer_config.json with the special tokens given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(rules), encoding="utf-8")
    if special:
        (folder / "tokenizer_config.json").write_text(json.dumps(special), encoding="utf-8")
    return folder


def sentencepiece_folder(folder: Path, **changes: Any) -> Path:
    """The tokenizer above as a folder."""
    return save_rules(folder, sentencepiece_rules(**changes), bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def ids_of(rules: dict[str, Any], *entries: str | bytes) -> list[int]:
    """Ids by entry; bytes objects become their byte tokens."""
    vocabulary = rules["model"]["vocab"]
    ids: list[int] = []
    for entry in entries:
        ids += [3 + byte for byte in entry] if isinstance(entry, bytes) else [vocabulary[entry]]
    return ids


def jsonl(texts: Iterable[str]) -> bytes:
    """JSON lines, each with its text and a field that is not read."""
    return b"".join(json.dumps({"source": n, "text": text}).encode() + b"\n" for n, text in enumerate(texts))


def many_texts(count: int, seed: int = 0) -> list[str]:
    """Distinct texts of a few dozen words."""
    rng = np.random.default_rng(seed)
    words = np.array(["the", "a", "cat", "sat", "mat", "and", "then", "at", "dawn", "quite\n\nfar", "away,", "ease."])
    return [f"{n} " + " ".join(rng.choice(words, rng.integers(5, 60))) for n in range(count)]


def counting_tokens(folder: Path, num_tokens: int, document: int = 10, vocab_size: int = 1 << 20) -> TokenFile:
    """A training split whose token at place p is p + 1, in documents that each end in EOS = 0."""
    ids = np.arange(1, num_tokens + 1)
    ids[document - 1 :: document] = 0
    ids[-1] = 0
    write_token_files(folder, {"train": np.split(ids, range(document, num_tokens, document))}, vocab_size, eos_id=0)
    return TokenFile.open(folder)


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, as the library has it."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def fingerprints(manifest: Manifest) -> dict[str, str]:
    return {name: split.fingerprint for name, split in manifest.splits.items()}


def documents(folder: Path, split: str) -> list[str]:
    file = TokenFile.open(folder, split, verify=True)
    tokenizer = load(file.tokenizer_dir)
    return [tokenizer.decode(file.document(n).tolist()) for n in range(file.num_documents)]
