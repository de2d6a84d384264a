"""A small corpus of ids for the tests of training: documents of a noisy cycle, so that there is something to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from efla_data.corpus.writer import write_token_files
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

VOCAB, EOS = 61, 0


def write_corpus(
    folder: Path, tokens: int = 1024, heldout: int = 250, seed: int = 0, documents: list[list[int]] | None = None
) -> Path:
    """Token files of about `tokens` training and `heldout` held-out ids, with a word-level tokenizer beside them.

    documents: to be used for both instead of random ones.
    """
    rng = np.random.default_rng(seed)
    splits = {"train": documents or _documents(rng, tokens), "heldout": documents or _documents(rng, heldout)}
    write_token_files(folder, splits, VOCAB, EOS)
    (folder / "tokenizer").mkdir()
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "unk_token": "w1"}'
    (folder / "tokenizer" / "tokenizer_config.json").write_text(settings)
    return folder


def _documents(rng: np.random.Generator, tokens: int) -> list[list[int]]:
    documents, left = [], tokens
    while left > 1:
        length = min(left, int(rng.integers(3, 80)))
        ids = (1 + (rng.integers(0, VOCAB) + 7 * np.arange(length - 1)) % (VOCAB - 1)).tolist()
        noisy = [int(rng.integers(1, VOCAB)) if rng.random() < 0.1 else i for i in ids]
        documents.append([*noisy, EOS])
        left -= length
    return documents
