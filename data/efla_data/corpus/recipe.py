"""The recipe of a corpus: every choice that decides which ids come out, and no other."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from efla_data.errors import DataError
from efla_data.fields import PathRule, key

MIN_TRAINED_VOCABULARY = 258  # 256 bytes, BOS, EOS
SOURCE = PathRule(prefixes=("hub:", "builtin:"))
TOKENIZER = PathRule(words=("train",), existing=True)
MANIFEST_KEYS = {"split": "hub_split", "revision": "hub_revision"}  # names in the manifest that differ from the fields'
HELDOUT_FRACTION = "share of documents held out, chosen by their hash; 0: none"


@dataclass
class Recipe:
    """Sources, tokenizer and policies of one corpus: the `data.` keys that the manifest records.

    Sources are read in the order given. Documents whose text is held out count as before all others when duplicates
    are removed.
    """

    sources: list[str] = key([], "files, globs, folders, hub:NAME[:CONFIG[:SPLIT]], or builtin:pydoc", path=SOURCE)
    tokenizer: str = key(
        "train", "folder, file or hub name of a tokenizer; `train`: a BPE on the corpus", path=TOKENIZER
    )
    vocab_size: int = key(2048, "vocabulary of a BPE trained here (data.tokenizer=train)")
    text_field: str = key("text", "field of a JSON or parquet row that holds the document")
    split: str = key("train", "split of a hub source that names none")
    revision: str | None = key(None, "commit of a hub source; null: its newest")
    heldout_sources: list[str] | None = key(
        None, "held-out text, in the form of data.sources", path=SOURCE, instead_of="heldout_fraction"
    )
    heldout_fraction: float | None = key(None, HELDOUT_FRACTION, instead_of="heldout_sources")
    split_seed: int = key(42, "seed of the held-out choice and of data.sample=documents")
    bos: bool = key(False, "put BOS at the start of each document (EOS always ends it)")
    deduplicate: bool = key(False, "leave out documents whose text came before, and training text that is held out")
    max_tokens: int | None = key(
        None, "training tokens to keep, up to a whole document; null: all", also_called=("num_tokens", "token_budget")
    )
    sample: str = key(
        "head",
        "what data.max_tokens keeps: the head of the corpus, or documents chosen by their hash from all of it",
        choices=("head", "documents"),
    )

    @property
    def keeps_keys(self) -> bool:
        """Whether documents are chosen after all of them were read, by a key kept for each."""
        return self.deduplicate or self.sample == "documents"

    def check(self) -> None:
        """Check values. Raises DataError."""
        if self.heldout_sources and self.heldout_fraction:
            raise DataError(
                f"data.heldout_sources={self.heldout_sources} and data.heldout_fraction={self.heldout_fraction} "
                "exclude each other: set one of them to null"
            )
        if not 0 <= (self.heldout_fraction or 0) < 1:
            raise DataError(
                f"data.heldout_fraction: expected 0 <= fraction < 1, got {self.heldout_fraction}; e.g. 0.01"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise DataError(f"data.max_tokens: expected at least 1 or null, got {self.max_tokens}")
        if self.sample not in ("head", "documents"):
            raise DataError(f"data.sample: expected head or documents, got {self.sample!r}")
        if self.sample == "documents" and self.max_tokens is None:
            raise DataError("data.sample=documents: set data.max_tokens to the size of the sample, e.g. 8_000_000_000")
        if self.tokenizer == "train" and not MIN_TRAINED_VOCABULARY <= self.vocab_size <= 1 << 20:
            expected = f"{MIN_TRAINED_VOCABULARY} (256 bytes, BOS, EOS) to {1 << 20}"
            raise DataError(f"data.vocab_size: expected {expected} for a trained tokenizer, got {self.vocab_size}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names that the manifest has, for JSON."""
        return {MANIFEST_KEYS.get(name, name): value for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`."""
        names = {there: here for here, there in MANIFEST_KEYS.items()}
        return cls(**{names.get(name, name): value for name, value in values.items()})
