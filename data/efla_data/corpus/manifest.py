"""`manifest.json`: what a folder of token files holds, where it came from, and how to check it.

The fingerprint of a split is a hash of its content alone (token bytes, document ends, dtype, vocabulary, special
ids). Paths, dates, library versions and the number of processes do not enter it, so equal data have equal
fingerprints wherever they were made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from efla_data.atomic import write_atomically
from efla_data.errors import DataError

FORMAT = "efla-token-files"
SCHEMA = 1
FILE_NAME = "manifest.json"
SPLITS = ("train", "heldout")
DTYPES = ("uint16", "uint32")
AGAIN = "make it again with scripts.prepare overwrite=true"


@dataclass(frozen=True)
class TokenizerInfo:
    """Who made the ids. `vocab_size` is the largest id + 1: a model needs at least that many embeddings."""

    name: str
    sha256: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    add_bos: bool


@dataclass(frozen=True)
class Shard:
    """One pair of files. Sizes are checked on every open, the two hashes on request."""

    tokens_file: str
    index_file: str
    tokens: int
    documents: int
    text_bytes: int
    tokens_sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Split:
    """All shards of one split, in reading order, and the hash of their content."""

    tokens: int
    documents: int
    text_bytes: int
    fingerprint: str
    shards: list[Shard]


Part = TypeVar("Part", TokenizerInfo, Shard, Split)


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    `recipe` repeats the arguments of `prepare`; `sources` lists each file read with bytes, hash and documents;
    `skipped` counts documents left out by reason, `skipped_examples` names file and line of the first few.
    """

    dtype: str
    tokenizer: TokenizerInfo
    splits: dict[str, Split]
    recipe: dict[str, Any] = field(default_factory=dict)
    sources: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    skipped_examples: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    format: str = FORMAT
    schema: int = SCHEMA

    def save(self, folder: Path) -> None:
        """Write `manifest.json` under a temporary name, then rename it."""
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
        write_atomically(folder / FILE_NAME, text + "\n")


def split_fingerprint(dtype: str, tokenizer: TokenizerInfo, shards: list[Shard]) -> str:
    """sha256 over content: dtype, vocabulary size, special ids, then the hashes of every shard in order."""
    content = {
        "schema": SCHEMA,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id if tokenizer.add_bos else None,
        "eos_id": tokenizer.eos_id,
        "shards": [[shard.tokens_sha256, shard.index_sha256] for shard in shards],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def make_split(dtype: str, tokenizer: TokenizerInfo, shards: list[Shard]) -> Split:
    """Sum up the shards of a split and take their fingerprint."""
    return Split(
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        text_bytes=sum(shard.text_bytes for shard in shards),
        fingerprint=split_fingerprint(dtype, tokenizer, shards),
        shards=shards,
    )


def _checked(part: Part) -> Part:
    """The same part of a manifest. ValueError for a field of another type, a negative number, or a path."""
    for item in dataclasses.fields(part):
        kind = str(item.type)
        right = {"int": int, "str": str, "bool": bool}.get(kind.removesuffix(" | None"))
        if right is not None:
            _check_value(item.name, getattr(part, item.name), right, kind)
    return part


def _check_value(name: str, value: Any, right: type, kind: str) -> None:
    if value is None and kind.endswith("None"):
        return
    wrong = type(value) is not right
    if wrong or (right is int and value < 0):
        raise ValueError(f"{name} should be of type {kind}, is {value!r:.80}")
    if name.endswith("_file") and (value in ("", ".", "..") or Path(value).name != value):
        raise ValueError(f"{name} should be a file of this folder, is {value!r:.80}")


def load_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check `manifest.json`. DataError when it is missing, not ours, of another schema, or altered."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        hint = "make them with `python -m scripts.prepare data=...`, or set data.dir to a folder that has them"
        raise DataError(f"no token files in {folder}: {path} is missing; {hint}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise DataError(f"{path}: not a manifest of token files (expected format {FORMAT!r})")
        if raw.get("schema") != SCHEMA:
            raise DataError(f"{path}: schema {raw.get('schema')!r}, this version reads {SCHEMA}; {AGAIN}")
        raw["tokenizer"] = tokenizer = _checked(TokenizerInfo(**raw["tokenizer"]))
        if max(tokenizer.eos_id, tokenizer.bos_id or 0) >= tokenizer.vocab_size:
            raise ValueError(f"eos_id and bos_id should be below vocab_size {tokenizer.vocab_size}")
        splits = {}
        for name, split in raw["splits"].items():
            shards = [_checked(Shard(**shard)) for shard in split["shards"]]
            splits[name] = _checked(Split(**{**split, "shards": shards}))
        raw["splits"] = splits
        manifest = Manifest(**raw)
        if manifest.dtype not in DTYPES:
            raise ValueError(f"dtype should be one of {', '.join(DTYPES)}, is {manifest.dtype!r:.80}")
    except DataError:
        raise
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged manifest ({error}); {AGAIN}") from error
    for name, split in manifest.splits.items():
        expected = split_fingerprint(manifest.dtype, manifest.tokenizer, split.shards)
        if split.fingerprint != expected:
            got = split.fingerprint
            raise DataError(
                f"{path}: damaged manifest, fingerprint of {name!r} should be {expected}, got {got}; {AGAIN}"
            )
    return manifest
