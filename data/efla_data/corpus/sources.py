"""From the sources of a recipe to a fixed list of chunks of work, before any text is read.

A piece is a file, a stretch of a large file (bytes of plain JSON lines, row groups of parquet), one shard of a hub
data set, or the built-in corpus. A chunk is a run of consecutive pieces: a worker encodes one at a time, and a kill
never costs a finished one. Pieces and chunks depend on the sources alone, never on the number of processes.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla_data.corpus.recipe import Recipe
from efla_data.errors import DataError

KINDS = (".jsonl", ".ndjson", ".parquet", ".txt")
COMPRESSIONS = (".gz", ".xz", ".zst")
BUILTIN = "builtin:pydoc"
Tell = Callable[[str], None]
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


def plan_chunks(recipe: Recipe, tell: Tell | None = None) -> list[list[Piece]]:
    """All chunks of a recipe: training sources in the order given (sorted within a glob or folder), then held-out ones.

    A file named twice is read once; one named as held-out is never read for training. `tell`: see `find_files`.
    DataError for a source that does not exist.
    """
    heldout = _expand(recipe.heldout_sources or [], recipe, True, tell)
    kept_out = {os.path.realpath(piece.path) for piece in heldout if piece.is_file}
    training = _expand(recipe.sources, recipe, False, tell)
    training = [piece for piece in training if not (piece.is_file and os.path.realpath(piece.path) in kept_out)]
    if not training:
        raise DataError("data.sources: every file is also in data.heldout_sources, nothing is left to train on")
    total = sum(piece.bytes for piece in training + heldout)
    target = min(max(total // CHUNKS, SMALLEST_CHUNK), LARGEST_CHUNK)
    return _group(_cut(training, target), target) + _group(_cut(heldout, target), target)


def _expand(sources: list[str], recipe: Recipe, heldout: bool, tell: Tell | None) -> list[Piece]:
    pieces: list[Piece] = []
    seen: set[str] = set()
    for source in sources:
        if source == BUILTIN:
            pieces.append(Piece(BUILTIN, "pydoc", "", heldout, 0, 0))
        elif source.startswith("hub:"):
            pieces += _hub_shards(source, recipe, heldout)
        else:
            for path in find_files(source, "data.heldout_sources" if heldout else "data.sources", tell):
                if os.path.realpath(path) not in seen:
                    seen.add(os.path.realpath(path))
                    pieces.append(file_piece(path, heldout))
    return pieces


def find_files(source: str, key: str = "data.sources", tell: Tell | None = None) -> list[str]:
    """The files of a source, sorted by path: a file; the files of a known kind in a folder (all levels, links
    followed, hidden ones left out) or matching a glob.

    `tell` is called with a line on files of a folder that are left out. DataError, naming `key`, if there is no file.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source):
        raise DataError(f"{key}: {source} is a URL; expected local files: copy or mount them, or name hub:NAME")
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        found, left = _walk(path)
        if left and tell is not None:
            names = ", ".join(os.path.relpath(item, path) for item in left[:3])
            tell(
                f"{key}: {len(left)} hidden or of other kinds left out of {path} ({names}{', ...' * (len(left) > 3)}); "
                "name files or a glob to read them (.json is read as JSON lines)"
            )
    elif path.exists():
        if _suffixes(path.name)[0] not in (*KINDS, ".json"):
            raise DataError(f"{key}: {path} is of an unknown kind, expected {_known()}")
        found = [str(path)]
    elif glob.has_magic(source):
        matches = [match for match in glob.glob(str(path), recursive=True) if not os.path.isdir(match)]
        found = [match for match in matches if _suffixes(match)[0] in (*KINDS, ".json")]
    else:
        hint = " (hub data sets are written hub:NAME)" if key.startswith("data.") else ""
        raise DataError(f"{key}: {path} does not exist{hint}")
    if not found:
        raise DataError(f"{key}: no file of a known kind at {path}, expected {_known()}")
    if broken := [item for item in found if not os.path.isfile(item)]:
        raise DataError(f"{key}: {broken[0]} is a link to a file that does not exist")
    return sorted(found)


def _walk(folder: Path) -> tuple[list[str], list[str]]:
    """(files of a known kind, hidden entries and other files) below a folder; each real folder is visited once."""
    found: list[str] = []
    left: list[str] = []
    seen: set[str] = set()
    waiting = [str(folder)]
    while waiting:
        for root, folders, files in os.walk(waiting.pop(0)):  # does not descend into links, which come later
            if (real := os.path.realpath(root)) in seen:
                folders.clear()
                continue
            seen.add(real)
            left += [f"{root}/{name}" for name in folders if name.startswith(".")]
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            waiting += [f"{root}/{name}" for name in folders if os.path.islink(f"{root}/{name}")]
            for name in files:
                known = _suffixes(name)[0] in KINDS and not name.startswith(".")
                (found if known else left).append(f"{root}/{name}")
    return found, sorted(left)


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
    kind = "jsonl" if kind in (".ndjson", ".json") else kind[1:]
    return Piece(path, kind, compression[1:], heldout, stat.st_size, stat.st_mtime_ns)


def _cut(pieces: list[Piece], target: int) -> list[Piece]:
    """Cut files that can be read from the middle into stretches of about `target` bytes."""
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
        except Exception as error:  # whatever the network or the hub reports, named with its key
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


@functools.lru_cache(maxsize=8)  # listing a large data set can take minutes; a worker does it once
def open_hub(name: str, config: str, split: str, revision: str | None) -> Any:
    """The `datasets.IterableDataset` of a hub data set (or of a local folder that `datasets` can read)."""
    import datasets

    try:
        return datasets.load_dataset(name, config or None, split=split, revision=revision, streaming=True)
    except Exception as error:  # as above
        what = f"hub:{name}:{config}:{split}"
        raise DataError(f"data.sources: {what} could not be opened: {error}") from error
