"""Concatenate the token files of finished chunks into the shards of each split, and write the manifest."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np

from efla_data.corpus.chunk import ChunkResult, chunk_prefix
from efla_data.corpus.manifest import SPLITS, Manifest, Shard, Split, TokenizerInfo, make_split
from efla_data.corpus.readers import EXAMPLES
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.selection import Selection
from efla_data.corpus.sources import Piece
from efla_data.corpus.writer import ShardWriter
from efla_data.errors import DataError
from efla_data.loader.token_file import INDEX_DTYPE, token_dtype

COPIED_TOKENS = 1 << 22  # copied at a time, but always whole documents
SHARD_TOKENS = 1 << 31  # a shard ends with the chunk that reaches this: about 4 GiB at 2 bytes each


def assemble(
    folder: Path,
    out: Path,
    recipe: Recipe,
    chunks: list[list[Piece]],
    results: dict[int, ChunkResult],
    info: TokenizerInfo,
    selection: Selection | None = None,
) -> Manifest:
    """Write `OUT/{train,heldout}-00000.{bin,idx}`, further shards and `OUT/manifest.json` from the chunks in `results`,
    in order, with the documents that `selection` keeps. DataError if a requested split has no document.
    """
    pieces = [entry for index in sorted(results) for entry in results[index].pieces]
    skipped, examples = _skipped(pieces)
    splits: dict[str, Split] = {}
    dtype = token_dtype(info.vocab_size)
    for split in SPLITS:
        if split == "heldout" and not (recipe.heldout_sources or recipe.heldout_fraction):
            continue
        shards = _write_shards(folder, out, split, dtype, results, selection)
        splits[split] = make_split(dtype.name, info, shards)
    if selection is not None:
        skipped.update(_left_out(recipe, pieces, splits, selection))
    for split in splits:
        if splits[split].documents == 0:
            raise DataError(_nothing(split, recipe, pieces, skipped, examples))
    manifest = Manifest(
        dtype=dtype.name,
        tokenizer=info,
        splits=splits,
        recipe=recipe.to_dict(),
        sources=_sources(chunks, pieces),
        skipped=dict(sorted(skipped.items())),
        skipped_examples=examples,
        versions={
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("efla-lm", "tokenizers", "numpy")},
        },
    )
    manifest.save(out)
    return manifest


def _write_shards(
    folder: Path,
    out: Path,
    split: str,
    dtype: np.dtype,
    results: dict[int, ChunkResult],
    selection: Selection | None,
) -> list[Shard]:
    """Write the documents of one split to files of about SHARD_TOKENS."""
    left = deque(
        index
        for index in sorted(results)
        if results[index].shards[split].documents and (selection is None or selection.mask((index, split)).any())
    )
    shards: list[Shard] = []
    while left or not shards:
        with ShardWriter(out / f"{split}-{len(shards):05d}", dtype) as writer:
            while left and writer.tokens < SHARD_TOKENS:
                index = left.popleft()
                _append(writer, folder, index, split, dtype, results[index], selection)
            shards.append(writer.close())
    return shards


def _append(
    writer: ShardWriter,
    folder: Path,
    index: int,
    split: str,
    dtype: np.dtype,
    result: ChunkResult,
    selection: Selection | None,
) -> None:
    """Append one chunk's documents to the writer, some at a time."""
    prefix = f"{chunk_prefix(folder, index)}.{split}"
    tokens = np.memmap(f"{prefix}.bin", dtype=dtype, mode="r")
    ends = np.fromfile(f"{prefix}.idx", dtype=INDEX_DTYPE).astype(np.int64)
    keep = None if selection is None else selection.mask((index, split))
    first = begin = 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, begin + COPIED_TOKENS, side="right")))
        ids, some = tokens[begin : ends[last - 1]], ends[first:last] - begin
        if keep is not None:
            lengths = np.diff(some, prepend=0)
            ids, some = ids[np.repeat(keep[first:last], lengths)], np.cumsum(lengths[keep[first:last]])
        writer.add_many(ids, some, 0)
        first, begin = last, int(ends[last - 1])
    if selection is None:
        writer.text_bytes += result.shards[split].text_bytes
    else:
        writer.text_bytes += int(selection.keys((index, split))["text_bytes"][keep].sum())


def _left_out(
    recipe: Recipe, pieces: list[dict[str, Any]], splits: dict[str, Split], selection: Selection
) -> Counter[str]:
    """Usable documents that were dropped: duplicates, and those beyond the budget or outside the sample."""
    usable, kept = sum(piece["documents"] for piece in pieces), sum(split.documents for split in splits.values())
    counts = Counter({"duplicate": selection.duplicates()})
    counts["not_sampled" if recipe.sample == "documents" else "over_budget"] = usable - kept - counts["duplicate"]
    return +counts


def _skipped(pieces: list[dict[str, Any]]) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Counts over all pieces, and the first examples; record numbers count from the start of the source."""
    skipped: Counter[str] = Counter()
    examples: list[dict[str, Any]] = []
    before: Counter[str] = Counter()  # records of earlier pieces of the same source
    for piece in pieces:
        skipped.update(piece["skipped"])
        for example in piece["examples"][: EXAMPLES - len(examples)]:
            examples.append({**example, "record": example["record"] + before[piece["path"]]})
        before[piece["path"]] += piece["records"]
    return skipped, examples


def _sources(chunks: list[list[Piece]], pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per source in reading order; sources that `max_tokens` left unread have no hash and 0 documents."""
    lines: dict[tuple[str, bool], dict[str, Any]] = {}
    for piece in (piece for chunk in chunks for piece in chunk):
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
    if recipe.max_tokens is not None:
        return (
            f"no held-out document: {why}; data.max_tokens={recipe.max_tokens} ends the corpus before "
            f"data.heldout_fraction={recipe.heldout_fraction} chose one; raise data.max_tokens, or name "
            "data.heldout_sources"
        )
    return (
        f"no held-out document: {why}, none of them chosen by data.heldout_fraction={recipe.heldout_fraction}; "
        f"raise it, set it to 0, or name data.heldout_sources"
    )
