"""Turn one chunk of the sources into token files of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from efla_data.corpus.encode import TextEncoder
from efla_data.corpus.manifest import SPLITS, Shard
from efla_data.corpus.pool import Report
from efla_data.corpus.readers import Tally, pydoc_topics, read_documents
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.sources import Piece
from efla_data.corpus.writer import ShardWriter
from efla_data.loader.token_file import file_sha256

REPORT_BYTES = 1 << 22  # text between two reports of progress
EVERY_HASH = 1 << 64
# The key of a document, kept if documents are chosen later: 128 bits of a hash of its text, and its size.
KEY_DTYPE = np.dtype([("high", "<u8"), ("low", "<u8"), ("text_bytes", "<u8")])


@dataclass(frozen=True)
class Limits:
    """How much of a chunk to take: documents up to `max_tokens` training tokens, of those with a hash below `below`."""

    max_tokens: int | None = None
    below: int = EVERY_HASH


@dataclass
class ChunkResult:
    """The result of a chunk, kept beside its token files as JSON."""

    shards: dict[str, Shard]
    pieces: list[dict[str, Any]] = field(default_factory=list)  # one entry per piece, in order
    below: int = EVERY_HASH  # the `Limits.below` of the run that made it

    @property
    def train_tokens(self) -> int:
        """Training tokens of this chunk."""
        return self.shards["train"].tokens


@dataclass(frozen=True)
class Encoder:
    """What a worker needs to encode any chunk. report(UTF-8 bytes of text, tokens): progress since the last call."""

    recipe: Recipe
    text: TextEncoder
    report: Report


def is_held_out(text: bytes, recipe: Recipe) -> bool:
    """Whether a document of the training sources belongs to the held-out split. Its hash decides, not its place."""
    if not recipe.heldout_fraction:
        return False
    digest = hashlib.blake2b(text, digest_size=8, key=f"heldout {recipe.split_seed}".encode()).digest()
    return int.from_bytes(digest, "little") < recipe.heldout_fraction * 2**64


def chunk_prefix(folder: Path, index: int) -> Path:
    """The files of a chunk, without their suffixes."""
    return folder / "chunks" / f"{index:06d}"


def document_hash(text: bytes, recipe: Recipe) -> tuple[int, int]:
    """128 bits of a hash of the text, as two numbers below 2^64. The first orders documents for a sample."""
    digest = hashlib.blake2b(text, digest_size=16, key=f"document {recipe.split_seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def encode_chunk(encoder: Encoder, pieces: list[Piece], prefix: Path, limits: Limits) -> ChunkResult:
    """Read, split, encode and write the documents of a chunk to `PREFIX.{train,heldout}.{bin,idx}` and `PREFIX.json`.

    Ends after the document that brings the training tokens to `limits.max_tokens`. If `recipe.keeps_keys`, the
    documents' keys go to `PREFIX.{train,heldout}.key`. Files are written under names of this process and renamed at the
    end, the JSON last: a chunk is complete if its JSON is there.
    """
    recipe, report = encoder.recipe, encoder.report
    temporary = prefix.with_name(f"{prefix.name}.{os.getpid()}")
    writers = {split: ShardWriter(f"{temporary}.{split}", encoder.text.dtype) for split in SPLITS}
    keys = {split: array("Q") for split in SPLITS}  # KEY_DTYPE, flat
    entries: list[dict[str, Any]] = []
    text_bytes = tokens = 0
    try:
        for piece in pieces:
            tally = Tally()
            for text, encoded in read_documents(piece, recipe.text_field, tally):
                split = "heldout" if piece.heldout or is_held_out(encoded, recipe) else "train"
                text_bytes += len(encoded)
                if text_bytes >= REPORT_BYTES:
                    report(text_bytes, tokens)
                    text_bytes = tokens = 0
                if recipe.keeps_keys:
                    high, low = document_hash(encoded, recipe)
                    if high >= limits.below and not piece.heldout:
                        continue
                    keys[split].extend((high, low, len(encoded)))
                ids = encoder.text.encode(text)
                writers[split].add(ids, len(encoded))
                tokens += len(ids)
                if limits.max_tokens is not None and writers["train"].tokens >= limits.max_tokens:
                    break
            entries.append(_describe(piece, tally))
            if limits.max_tokens is not None and writers["train"].tokens >= limits.max_tokens:
                break
        report(text_bytes, tokens)
        shards = {split: writer.close() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.__exit__()
    suffixes = ["bin", "idx"]
    if recipe.keeps_keys:
        suffixes.append("key")
        for split in SPLITS:
            np.array(keys[split], dtype=np.uint64).view(KEY_DTYPE).tofile(f"{temporary}.{split}.key")
    result = ChunkResult(shards, entries, limits.below)
    Path(f"{prefix}.json").unlink(missing_ok=True)  # of an earlier run over this chunk, whose files are replaced now
    for split in SPLITS:
        for suffix in suffixes:
            os.replace(f"{temporary}.{split}.{suffix}", f"{prefix}.{split}.{suffix}")
    with open(f"{temporary}.json", "w", encoding="utf-8") as handle:
        json.dump(dataclasses.asdict(result), handle)
    os.replace(f"{temporary}.json", f"{prefix}.json")
    return result


def load_result(prefix: Path) -> ChunkResult | None:
    """The result of a complete chunk, else None."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    return ChunkResult({split: Shard(**shard) for split, shard in raw["shards"].items()}, raw["pieces"], raw["below"])


def _describe(piece: Piece, tally: Tally) -> dict[str, Any]:
    """The piece's entry for the manifest. The worker that reads the start of a file hashes it, from a warm cache."""
    sha256 = None
    if piece.is_file and piece.start == 0:
        sha256 = file_sha256(piece.path)
    elif piece.kind == "pydoc":
        sha256 = hashlib.sha256("\0".join(pydoc_topics()).encode()).hexdigest()
    return {
        "path": piece.path,
        "heldout": piece.heldout,
        "bytes": piece.bytes,
        "mtime_ns": piece.mtime_ns,
        "revision": piece.revision,
        "sha256": sha256,
        "records": tally.records,
        "documents": tally.documents,
        "skipped": dict(tally.skipped),
        "examples": tally.examples,
    }
