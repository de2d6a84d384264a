"""What `prepare` is asked to do: every choice that decides which ids come out, and nothing else."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from efla_data.errors import DataError

MIN_TRAINED_VOCABULARY = 258  # 256 bytes, BOS, EOS


@dataclass(frozen=True)
class Recipe:
    """Sources, tokenizer and policies of one corpus. Kept in the manifest.

    sources           files, globs, folders, `hub:NAME[:CONFIG[:SPLIT]]`, `builtin:pydoc`; read in this order
    tokenizer         a folder with `tokenizer.json`, such a file, a hub name, or `train` (a BPE on the corpus)
    vocab_size        of a tokenizer trained here; unused otherwise
    text_field        field of a JSON line or parquet row that holds the text
    hub_split, hub_revision   split and commit of hub sources that do not name their own
    heldout_sources   held-out text, in the form of `sources`; or
    heldout_fraction  share of documents held out, chosen by hash of text and `split_seed`; None or 0 holds out
    nothing
    bos               put BOS before each document (EOS always ends one)
    deduplicate       leave out a document whose text came before (held-out ones count as before all others)
    max_tokens        stop after the document that reaches this many training tokens
    sample            which documents `max_tokens` keeps: "head", those at the beginning; "documents", a sample of the
    whole corpus by hash of text and `split_seed`
    """

    sources: list[str]
    tokenizer: str = "train"
    vocab_size: int = 2048
    text_field: str = "text"
    hub_split: str = "train"
    hub_revision: str | None = None
    heldout_sources: list[str] | None = None
    heldout_fraction: float | None = None
    split_seed: int = 42
    bos: bool = False
    deduplicate: bool = False
    max_tokens: int | None = None
    sample: str = "head"

    @property
    def keeps_keys(self) -> bool:
        """Whether which documents stay is decided after all were read, by what is kept of each."""
        return self.deduplicate or self.sample == "documents"

    def check(self) -> None:
        """DataError for values that cannot be meant."""
        if not self.sources:
            raise DataError("data.sources is empty: give files, globs, folders, hub:NAME or builtin:pydoc")
        if self.heldout_sources and self.heldout_fraction:
            raise DataError(
                "data.heldout_sources and data.heldout_fraction exclude each other: set one of them to null"
            )
        if not 0 <= (self.heldout_fraction or 0) < 1:
            raise DataError(f"data.heldout_fraction: expected 0 <= fraction < 1, got {self.heldout_fraction}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise DataError(f"data.max_tokens: expected at least 1 or null, got {self.max_tokens}")
        if self.sample not in ("head", "documents"):
            raise DataError(f"data.sample: expected head or documents, got {self.sample!r}")
        if self.sample == "documents" and self.max_tokens is None:
            raise DataError("data.sample=documents: set data.max_tokens to the size of the sample")
        if self.tokenizer == "train" and not MIN_TRAINED_VOCABULARY <= self.vocab_size <= 1 << 20:
            expected = f"{MIN_TRAINED_VOCABULARY} (256 bytes, BOS, EOS) to {1 << 20}"
            raise DataError(f"data.vocab_size: expected {expected} for a trained tokenizer, got {self.vocab_size}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)
