"""Put the token files of finished units together into one shard per split, and write the manifest."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from efla_data.errors import DataError
from efla_data.manifest import SPLITS, Manifest, Split, TokenizerInfo, make_split
from efla_data.readers import EXAMPLES
from efla_data.recipe import Recipe
from efla_data.sources import Piece
from efla_data.token_file import INDEX_DTYPE, token_dtype
from efla_data.unit import UnitResult, unit_prefix
from efla_data.writer import ShardWriter

COPIED_DOCUMENTS = 1 << 16  # at a time


def assemble(
    folder: Path,
    out: Path,
    recipe: Recipe,
    units: list[list[Piece]],
    results: dict[int, UnitResult],
    info: TokenizerInfo,
) -> Manifest:
    """Write `OUT/{train,heldout}-00000.{bin,idx}` and `OUT/manifest.json` from the units in `results`, in their order.

    DataError when a split that was asked for holds no document.
    """
    pieces = [entry for index in sorted(results) for entry in results[index].pieces]
    skipped, examples = _skipped(pieces)
    splits: dict[str, Split] = {}
    dtype = token_dtype(info.vocab_size)
    for split in SPLITS:
        if split == "heldout" and not (recipe.heldout_sources or recipe.heldout_fraction):
            continue
        with ShardWriter(out / f"{split}-00000", dtype) as writer:
            for index in sorted(results):
                _append(writer, Path(f"{unit_prefix(folder, index)}.{split}"), results[index], split, dtype)
            splits[split] = make_split(dtype.name, info, [writer.close()])
        if splits[split].documents == 0:
            raise DataError(_nothing(split, recipe, pieces, skipped, examples))
    manifest = Manifest(
        dtype=dtype.name,
        tokenizer=info,
        splits=splits,
        recipe=recipe.to_dict(),
        sources=_sources(units, pieces),
        skipped=dict(sorted(skipped.items())),
        skipped_examples=examples,
        versions={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("efla-lm", "tokenizers", "numpy")},
        },
    )
    manifest.save(out)
    return manifest


def _append(writer: ShardWriter, prefix: Path, result: UnitResult, split: str, dtype: np.dtype) -> None:
    """Copy one unit's files behind what the writer has, some documents at a time."""
    if result.shards[split].documents == 0:
        return
    tokens = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r")
    ends = np.fromfile(f"{prefix}.idx", dtype=INDEX_DTYPE).astype(np.int64)
    begin = 0
    for first in range(0, len(ends), COPIED_DOCUMENTS):
        some = ends[first : first + COPIED_DOCUMENTS]
        writer.add_many(tokens[begin : some[-1]], some - begin, 0)
        begin = int(some[-1])
    writer.text_bytes += result.shards[split].text_bytes


def _skipped(pieces: list[dict[str, Any]]) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Counts over all pieces, and the first examples with their record number counted from the start of the source."""
    skipped: Counter[str] = Counter()
    examples: list[dict[str, Any]] = []
    before: Counter[str] = Counter()  # records of earlier pieces of the same source
    for piece in pieces:
        skipped.update(piece["skipped"])
        for example in piece["examples"][: EXAMPLES - len(examples)]:
            examples.append({**example, "record": example["record"] + before[piece["path"]]})
        before[piece["path"]] += piece["records"]
    return skipped, examples


def _sources(units: list[list[Piece]], pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per source in reading order; those that `max_tokens` left unread have no hash and 0 documents."""
    lines: dict[tuple[str, bool], dict[str, Any]] = {}
    for piece in (piece for unit in units for piece in unit):
        line = lines.setdefault(
            (piece.path, piece.heldout),
            {
                "path": piece.path,
                "heldout": piece.heldout,
                "bytes": 0,
                "mtime_ns": piece.mtime_ns,
                "revision": piece.revision,
                "sha256": None,
                "records": 0,
                "documents": 0,
            },
        )
        line["bytes"] += piece.bytes
    for entry in pieces:
        line = lines[entry["path"], entry["heldout"]]
        line["sha256"] = line["sha256"] or entry["sha256"]
        line["records"] += entry["records"]
        line["documents"] += entry["documents"]
    return list(lines.values())


def _nothing(
    split: str, recipe: Recipe, pieces: list[dict[str, Any]], skipped: Counter[str], examples: list[dict[str, Any]]
) -> str:
    records, documents = sum(piece["records"] for piece in pieces), sum(piece["documents"] for piece in pieces)
    why = f"{records} records read, {documents} documents usable"
    if skipped:
        why += f", skipped: {', '.join(f'{reason} {count}' for reason, count in sorted(skipped.items()))}"
        why += f" (first: {examples[0]['file']} record {examples[0]['record']}, {examples[0]['reason']})"
    if skipped["missing_field"]:
        why += f"; data.text_field is {recipe.text_field!r}"
    if documents == 0:
        return f"empty corpus: {why}"
    if split == "train":
        return f"no training document: {why}; lower data.heldout_fraction={recipe.heldout_fraction}"
    if recipe.heldout_sources:
        return f"no held-out document in data.heldout_sources: {why}"
    return (
        f"no held-out document: {why}, none of them chosen by data.heldout_fraction={recipe.heldout_fraction}; "
        f"raise it, set it to 0, or name data.heldout_sources"
    )
