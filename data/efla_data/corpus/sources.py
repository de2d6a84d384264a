"""From the names in a recipe to a fixed list of work chunks, before a byte is read.

A piece is a file, a stretch of a large one (bytes of plain JSON lines, row groups of parquet), one shard of a hub
data set, or the built-in corpus. A chunk is a run of consecutive pieces: what one worker turns into tokens at a
time, and what is not repeated after a kill. Pieces and chunks depend on the sources alone, never on the number of
processes.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla_data.corpus.recipe import Recipe
from efla_data.errors import DataError

KINDS = (".jsonl", ".ndjson", ".parquet", ".txt")
COMPRESSIONS = (".gz", ".xz", ".zst")
BUILTIN = "builtin:pydoc"
SMALLEST_CHUNK, LARGEST_CHUNK, CHUNKS = 1 << 20, 1 << 26, 64  # about 64 chunks, of 1 to 64 MiB on disk each


@dataclass(frozen=True)
class Piece:
    """Part of one source. `start`, `stop`: bytes (jsonl), row groups (parquet), shard and their count (hub)."""

    path: str  # absolute path, or `hub:NAME:CONFIG:SPLIT`, or `builtin:pydoc`
    kind: str  # jsonl, txt, parquet, hub, pydoc
    compression: str  # gz, xz, zst or empty
    heldout: bool
    bytes: int  # of this piece on disk; 0 when unknown
    mtime_ns: int
    start: int = 0
    stop: int = 0
    revision: str | None = None

    @property
    def is_file(self) -> bool:
        """Whether `path` names a file on this machine."""
        return self.kind in ("jsonl", "txt", "parquet")


def plan_chunks(recipe: Recipe) -> list[list[Piece]]:
    """All chunks of a recipe: training sources in the order given (sorted within a glob or folder), then held-out ones.

    A file named twice is read once; one named as held-out is never read for training. DataError for what is not
    there.
    """
    heldout = _expand(recipe.heldout_sources or [], recipe, heldout=True)
    kept_out = {os.path.realpath(piece.path) for piece in heldout if piece.is_file}
    training = _expand(recipe.sources, recipe, heldout=False)
    training = [piece for piece in training if not (piece.is_file and os.path.realpath(piece.path) in kept_out)]
    if not training:
        raise DataError("data.sources: every file is also in data.heldout_sources, nothing is left to train on")
    total = sum(piece.bytes for piece in training + heldout)
    target = min(max(total // CHUNKS, SMALLEST_CHUNK), LARGEST_CHUNK)
    return _group(_cut(training, target), target) + _group(_cut(heldout, target), target)


def _expand(sources: list[str], recipe: Recipe, heldout: bool) -> list[Piece]:
    pieces: list[Piece] = []
    seen: set[str] = set()
    for source in sources:
        if source == BUILTIN:
            pieces.append(Piece(BUILTIN, "pydoc", "", heldout, 0, 0))
        elif source.startswith("hub:"):
            pieces += _hub_shards(source, recipe, heldout)
        else:
            for path in find_files(source, "data.heldout_sources" if heldout else "data.sources"):
                if os.path.realpath(path) not in seen:
                    seen.add(os.path.realpath(path))
                    pieces.append(file_piece(path, heldout))
    return pieces


def find_files(source: str, key: str = "data.sources") -> list[str]:
    """A file as it is; the files of a known kind in a folder (all levels) or matching a glob, sorted by path.

    DataError, naming `key`, where there is none.
    """
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        found = [str(item) for item in path.rglob("*") if item.is_file() and _suffixes(item.name)[0] in KINDS]
        if not found:
            raise DataError(f"{key}: no file of a known kind ({_known()}) in folder {path}")
        return sorted(found)
    if path.exists():
        if _suffixes(path.name)[0] not in KINDS:
            raise DataError(f"{key}: {path} is of an unknown kind, expected {_known()}")
        return [str(path)]
    if glob.has_magic(source):
        matches = glob.glob(str(path), recursive=True)
        found = [match for match in matches if os.path.isfile(match) and _suffixes(match)[0] in KINDS]
        if not found:
            raise DataError(f"{key}: no file of a known kind ({_known()}) matches {path}")
        return sorted(found)
    raise DataError(
        f"{key}: {path} does not exist" + (" (hub data sets are written hub:NAME)" if key.startswith("data.") else "")
    )


def _suffixes(name: str) -> tuple[str, str]:
    """`a.jsonl.xz` -> (".jsonl", ".xz"); `a.txt` -> (".txt", "")."""
    stem, last = os.path.splitext(name.lower())
    if last in COMPRESSIONS:
        return os.path.splitext(stem)[1], last
    return last, ""


def _known() -> str:
    return f"{', '.join(KINDS)}; all but parquet also {', '.join(COMPRESSIONS)}"


def file_piece(path: str, heldout: bool) -> Piece:
    """A whole file as one piece."""
    kind, compression = _suffixes(path)
    if kind == ".parquet" and compression:
        raise DataError(f"data.sources: {path}: parquet is compressed inside, unpack the {compression} around it")
    stat = os.stat(path)
    kind = "jsonl" if kind == ".ndjson" else kind[1:]
    return Piece(path, kind, compression[1:], heldout, stat.st_size, stat.st_mtime_ns)


def _cut(pieces: list[Piece], target: int) -> list[Piece]:
    """Cut what can be entered in the middle into stretches of about `target` bytes."""
    result: list[Piece] = []
    for piece in pieces:
        if piece.kind == "jsonl" and not piece.compression:
            edges = [*range(0, max(piece.bytes, 1), target), piece.bytes]
            result += [_stretch(piece, a, b, b - a) for a, b in itertools.pairwise(edges)]
        elif piece.kind == "parquet":
            result += _row_groups(piece, target)
        else:
            result.append(piece)
    return result


def _stretch(piece: Piece, start: int, stop: int, size: int) -> Piece:
    return Piece(piece.path, piece.kind, piece.compression, piece.heldout, size, piece.mtime_ns, start, stop)


def _row_groups(piece: Piece, target: int) -> list[Piece]:
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(piece.path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{piece.path}: not a readable parquet file ({error})") from error
    count = metadata.num_row_groups
    per_group = piece.bytes / max(count, 1)
    step = max(1, round(target / max(per_group, 1)))
    edges = [*range(0, count, step), count] if count else [0, 0]
    return [_stretch(piece, a, b, round((b - a) * per_group)) for a, b in itertools.pairwise(edges)]


def _group(pieces: list[Piece], target: int) -> list[list[Piece]]:
    """Group consecutive pieces into chunks of `target` bytes. Hub shards and the built-in corpus stay alone."""
    chunks: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if chunks and piece.is_file and piece.bytes <= room:
            chunks[-1].append(piece)
            room -= piece.bytes
        else:
            chunks.append([piece])
            room = target - piece.bytes if piece.is_file else 0
    return chunks


def _hub_shards(source: str, recipe: Recipe, heldout: bool) -> list[Piece]:
    """One piece per shard of a streamed hub data set, at one commit for all workers."""
    name, config, split = parse_hub(source, recipe.split)
    path = f"hub:{name}:{config}:{split}"
    revision = recipe.revision
    if revision is None and not os.path.isdir(name):
        import huggingface_hub

        try:
            revision = huggingface_hub.HfApi().dataset_info(name).sha
        except Exception as error:  # whatever the network or the hub says, the user needs it with the key beside it
            raise DataError(f"data.sources: {source} could not be found on the hub: {error}") from error
    stream = open_hub(name, config, split, revision)
    count = stream.num_shards
    return [Piece(path, "hub", "", heldout, 0, 0, index, count, revision) for index in range(count)]


def parse_hub(source: str, default_split: str) -> tuple[str, str, str]:
    """`hub:NAME[:CONFIG[:SPLIT]]` -> (name, config or "", split)."""
    parts = source.split(":")[1:]
    if not 1 <= len(parts) <= 3 or not parts[0]:
        raise DataError(f"data.sources: expected hub:NAME[:CONFIG[:SPLIT]], got {source!r}")
    name, config, split = [*parts, "", ""][:3]
    return name, config, split or default_split


@functools.lru_cache(maxsize=8)  # finding the files of a large data set can take minutes; a worker does it once
def open_hub(name: str, config: str, split: str, revision: str | None) -> Any:
    """The `datasets.IterableDataset` of a hub data set (or of a local folder that `datasets` can read)."""
    import datasets

    try:
        return datasets.load_dataset(name, config or None, split=split, revision=revision, streaming=True)
    except Exception as error:  # as above
        what = f"hub:{name}:{config}:{split}"
        raise DataError(f"data.sources: {what} could not be opened: {error}") from error
