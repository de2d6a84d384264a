"""Which documents stand together in a window when whole documents are packed, worked out once per corpus and kept.

A document of L ids x_0 .. x_{L-1} (the last one EOS) gives n positions, each with its target:

    with BOS (x_0 = BOS)   inputs x_0 .. x_{L-2}          targets x_1 .. x_{L-1}     n = L - 1
    without BOS            inputs EOS, x_0 .. x_{L-2}     targets x_0 .. x_{L-1}     n = L

so a document opens as evaluation opens a text: with its BOS, else after EOS, which stands before it in the stream too.
n // T pieces of T positions fill a window each. The n mod T positions that are left are packed greedily, longest first:
a window takes the longest piece that is left, then again and again the longest that still fits, up to a number of
pieces. That is best-fit decreasing, computed on the counts of lengths, in blocks of documents: its cost does not grow
with their number, nor does memory.

    FOLDER/packing/SPLIT-T-MOST/windows.bin   first piece of each window, and the number of pieces; uint64 [W + 1]
    FOLDER/packing/SPLIT-T-MOST/starts.bin    place in the stream of a piece's first target; uint64 [P]
    FOLDER/packing/SPLIT-T-MOST/lengths.bin   positions of a piece; uint32 [P]
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

VERSION = 1  # of the choice of windows: another version gives other batches
BLOCK_DOCUMENTS = 1 << 17  # packed at a time
FILES: dict[str, np.dtype] = {"windows": np.dtype("<u8"), "starts": np.dtype("<u8"), "lengths": np.dtype("<u4")}


@dataclass(frozen=True)
class PlanInfo:
    """`plan.json`. positions: those with a target, over all windows."""

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
    windows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


def open_plan(token_file: TokenFile, context: int, most: int) -> Plan:
    """The plan kept beside the token files, made now if there is none of this version and content.

    Where the folder cannot be written it is made in a temporary place for this process alone.
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
        return _build_apart(token_file, context, most)
    try:
        _build(token_file, context, most, temporary)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rename(temporary, folder)
        except OSError:  # another process was faster: its plan is the same
            if _load(folder, token_file.fingerprint) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    plan = _load(folder, token_file.fingerprint)
    assert plan is not None
    return plan


def _build_apart(token_file: TokenFile, context: int, most: int) -> Plan:
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
    return Plan(info, **maps)


def _build(token_file: TokenFile, context: int, most: int, folder: Path) -> None:
    """Write the plan's files, the JSON last."""
    windows = pieces = positions = 0
    handles = {name: open(folder / f"{name}.bin", "wb") for name in FILES}  # noqa: SIM115 (closed below)
    try:
        for block in _blocks(token_file):
            for starts, lengths, per_window in _windows_of(*block, context, most):
                first = pieces + per_window * np.arange(len(starts) // per_window)
                for name, values in (("windows", first), ("starts", starts), ("lengths", lengths)):
                    handles[name].write(values.astype(FILES[name]).tobytes())
                windows, pieces, positions = windows + len(first), pieces + len(starts), positions + int(lengths.sum())
        handles["windows"].write(np.array([pieces], dtype=FILES["windows"]).tobytes())
    finally:
        for handle in handles.values():
            handle.close()
    info = PlanInfo(VERSION, token_file.fingerprint, context, most, windows, pieces, positions)
    (folder / "plan.json").write_text(json.dumps(dataclasses.asdict(info)) + "\n", encoding="utf-8")


def _blocks(token_file: TokenFile) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(place of the first target, positions) of some documents at a time, int64."""
    opening = int(token_file.manifest.tokenizer.add_bos)  # BOS is no target
    before = 0
    for first in range(0, token_file.num_documents, BLOCK_DOCUMENTS):
        ends = token_file.document_ends[first : first + BLOCK_DOCUMENTS].astype(np.int64)
        starts = np.concatenate([[before], ends[:-1]]) + opening
        before = int(ends[-1])
        some = ends > starts
        yield starts[some], (ends - starts)[some]


def _windows_of(
    starts: np.ndarray, sizes: np.ndarray, T: int, most: int
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """(starts, lengths, pieces per window) of runs of windows that have the same number of pieces."""
    full = sizes // T
    if full.any():
        nth = np.arange(full.sum()) - np.repeat(np.cumsum(full) - full, full)  # 0, 1, .. within each document
        yield np.repeat(starts, full) + T * nth, np.full(len(nth), T), 1
    left = sizes % T
    some = left > 0
    starts, left = (starts + full * T)[some], left[some]
    by_length = starts[np.argsort(left, kind="stable")]
    counts = np.bincount(left, minlength=T + 1)
    taken = (np.cumsum(counts) - counts).tolist()  # where the unused pieces of each length begin in `by_length`
    for pattern, times in _patterns(counts.tolist(), T, most):
        columns = []
        for length in pattern:
            columns.append(by_length[taken[length] : taken[length] + times])
            taken[length] += times
        yield np.stack(columns, 1).ravel(), np.tile(pattern, times), len(pattern)


def _patterns(counts: list[int], T: int, most: int) -> Iterator[tuple[list[int], int]]:
    """Lengths that fill one window, and how many windows are filled so, until `counts` (pieces by length) are used."""
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
