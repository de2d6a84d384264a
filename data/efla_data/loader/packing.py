"""Which documents share a sequence when whole documents are packed. Computed once per corpus and kept on disk.

A document of L ids x_0 .. x_{L-1} (the last one EOS) gives n positions, each with its target:

    with BOS (x_0 = BOS)   inputs x_0 .. x_{L-2}          targets x_1 .. x_{L-1}     n = L - 1
    without BOS            inputs EOS, x_0 .. x_{L-2}     targets x_0 .. x_{L-1}     n = L

So a document starts as evaluation starts a text: with its BOS, else after EOS, which precedes it in the stream too.
n // T segments of T positions fill a sequence each. The remaining n mod T positions are packed by best-fit decreasing:
a sequence takes the longest unused segment, then again and again the longest one that still fits, up to a number of
segments. This runs on the counts of lengths, in blocks of documents: neither its cost nor its memory grows with the
number of documents in the corpus.

    FOLDER/packing/SPLIT-T-MOST/windows.bin   first segment of each sequence, and the number of segments; uint64 [W + 1]
    FOLDER/packing/SPLIT-T-MOST/starts.bin    place in the stream of a segment's first target; uint64 [P]
    FOLDER/packing/SPLIT-T-MOST/lengths.bin   positions of a segment; uint32 [P]
    FOLDER/packing/SPLIT-T-MOST/plan.json     version, fingerprint of the token files, sizes
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efla_data.loader.token_file import TokenFile

VERSION = 1  # of the algorithm: another version gives other batches
BLOCK_DOCUMENTS = 1 << 17  # documents that are packed together
FILES: dict[str, np.dtype] = {"windows": np.dtype("<u8"), "starts": np.dtype("<u8"), "lengths": np.dtype("<u4")}


@dataclass(frozen=True)
class PlanInfo:
    """The content of `plan.json`. `windows` counts sequences, `pieces` segments, `positions` those with a target."""

    version: int
    fingerprint: str
    context: int
    most: int
    windows: int
    pieces: int
    positions: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Memory maps of the three files."""

    info: PlanInfo
    sequences: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def open_plan(token_file: TokenFile, context: int, most: int) -> Plan:
    """Open the plan kept beside the token files; build it first if none of this version and content exists.

    If the folder cannot be written, each process builds the plan in a temporary folder of its own.
    """
    folder = token_file.folder / "packing" / f"{token_file.split}-{context}-{most}"
    plan = _load(folder, token_file.fingerprint)
    if plan is not None:
        return plan
    try:
        folder.parent.mkdir(exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return _build_temporary(token_file, context, most)
    try:
        _build(token_file, context, most, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process finished first; its plan is the same
            if _load(folder, token_file.fingerprint) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    plan = _load(folder, token_file.fingerprint)
    assert plan is not None
    return plan


def _build_temporary(token_file: TokenFile, context: int, most: int) -> Plan:
    with tempfile.TemporaryDirectory() as temporary:
        _build(token_file, context, most, Path(temporary))
        plan = _load(Path(temporary), token_file.fingerprint)
        assert plan is not None
        return plan  # the maps keep the files alive


def _load(folder: Path, fingerprint: str) -> Plan | None:
    try:
        info = PlanInfo(**json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    counts = {"windows": info.windows + 1, "starts": info.pieces, "lengths": info.pieces}
    fits = all(
        (folder / f"{name}.bin").is_file() and (folder / f"{name}.bin").stat().st_size == counts[name] * dtype.itemsize
        for name, dtype in FILES.items()
    )
    if info.version != VERSION or info.fingerprint != fingerprint or not fits:
        return None
    maps = {
        name: np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r") if counts[name] else np.empty(0, dtype)
        for name, dtype in FILES.items()
    }
    return Plan(info, *(maps[name] for name in FILES))


def _build(token_file: TokenFile, context: int, most: int, folder: Path) -> None:
    """Write the plan's files, `plan.json` last."""
    sequences = segments = positions = 0
    handles = {name: open(folder / f"{name}.bin", "wb") for name in FILES}  # noqa: SIM115 (closed below)
    try:
        for block in _blocks(token_file):
            for starts, lengths, per_sequence in _fill_sequences(*block, context, most):
                first = segments + per_sequence * np.arange(len(starts) // per_sequence)
                for name, values in (("windows", first), ("starts", starts), ("lengths", lengths)):
                    handles[name].write(values.astype(FILES[name]).tobytes())
                sequences, segments = sequences + len(first), segments + len(starts)
                positions += int(lengths.sum())
        handles["windows"].write(np.array([segments], dtype=FILES["windows"]).tobytes())
    finally:
        for handle in handles.values():
            handle.close()
    info = PlanInfo(VERSION, token_file.fingerprint, context, most, sequences, segments, positions)
    (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(info)) + "\n", encoding="utf-8")


def _blocks(token_file: TokenFile) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (place of the first target, number of positions) of a block of documents, int64."""
    opening = int(token_file.manifest.tokenizer.add_bos)  # BOS is no target
    before = 0
    for first in range(0, token_file.num_documents, BLOCK_DOCUMENTS):
        ends = token_file.document_ends[first : first + BLOCK_DOCUMENTS].astype(np.int64)
        starts = np.concatenate([[before], ends[:-1]])
        if (wrong := np.flatnonzero((ends < starts) | (ends > token_file.num_tokens))).size:
            document = int(wrong[0])
            raise token_file.damaged_index(
                f"document {first + document} is from token {starts[document]} to {ends[document]}"
            )
        starts, before = starts + opening, int(ends[-1])
        used = ends > starts
        yield starts[used], (ends - starts)[used]


def _fill_sequences(
    starts: np.ndarray, sizes: np.ndarray, T: int, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield (starts, lengths, segments per sequence) for groups of sequences with the same number of segments."""
    full = sizes // T
    if full.any():
        nth = np.arange(full.sum()) - np.repeat(np.cumsum(full) - full, full)  # 0, 1, ... within each document
        yield np.repeat(starts, full) + T * nth, np.full(len(nth), T), 1
    rest = sizes % T
    used = rest > 0
    starts, rest = (starts + full * T)[used], rest[used]
    by_length = starts[np.argsort(rest, kind="stable")]
    counts = np.bincount(rest, minlength=T + 1)
    unused = (np.cumsum(counts) - counts).tolist()  # where the unused segments of each length begin in `by_length`
    for pattern, times in _patterns(counts.tolist(), T, most):
        columns = []
        for length in pattern:
            columns.append(by_length[unused[length] : unused[length] + times])
            unused[length] += times
        yield np.stack(columns, 1).ravel(), np.tile(pattern, times), len(pattern)


def _patterns(counts: list[int], T: int, most: int) -> Iterator[tuple[list[int], int]]:
    """Yield (segment lengths of one sequence, number of such sequences) until `counts` (by length) are used up."""
    lengths = [length for length, count in enumerate(counts) if count]
    while lengths:
        pattern: list[int] = []
        room, used, at = T, dict[int, int](), len(lengths) - 1
        while at >= 0 and len(pattern) < most:
            length = lengths[at]
            if used.get(length, 0) == counts[length]:
                at -= 1
                continue
            pattern.append(length)
            used[length] = used.get(length, 0) + 1
            room -= length
            at = bisect.bisect_right(lengths, room, hi=at + 1) - 1
        times = min(counts[length] // uses for length, uses in used.items())
        for length, uses in used.items():
            counts[length] -= times * uses
            if not counts[length]:
                del lengths[bisect.bisect_left(lengths, length)]
        yield pattern, times
