"""Whether a checkpoint can be used: sizes and small files first, every byte before a weight is read."""

from __future__ import annotations

import io
import re
import zipfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from efla_lm.errors import UserError
from efla_lm.run.checksums import THREADS, Span, damaged_file, wrong_size
from efla_lm.run.meta import META, UNSEALED_FORMAT, read_meta
from efla_lm.run.tensor_index import read_index

SHARDS = ".distcp"  # the files of tensors end so


def fault_in(step_dir: Path) -> str | None:
    """Why this checkpoint cannot be used, or None if it is whole. Reads no tensors: of their files only the sizes."""
    try:
        meta = read_meta(step_dir)
    except UserError as error:
        return str(error)
    if re.fullmatch(r"step-\d+", step_dir.name) and step_dir.name != f"step-{meta.step}":
        return f"{step_dir / META}: names step {meta.step}"
    for name, expected in meta.files.items():
        if fault := wrong_size(step_dir / name, expected):
            return fault
    small = [(step_dir / name, sums, None) for name, sums in meta.files.items() if not name.endswith(SHARDS)]
    return damaged_file(small, meta.block)


def damage_in(step_dir: Path, prefix: str = "") -> str | None:
    """As `fault_in`, and every byte of the tensors whose names begin with `prefix` has the checksum it was saved with:
    sizes alone would let a flipped bit, or zeros after a power cut, become a weight."""
    if fault := fault_in(step_dir):
        return fault
    try:
        meta, index = read_meta(step_dir), read_index(step_dir)
    except UserError as error:
        return str(error)
    pieces: dict[str, list[tuple[str, Span]]] = defaultdict(list)
    for place, info in index.storage_data.items():
        if info.relative_path not in meta.files:
            return f"{step_dir / META}: does not list {info.relative_path}, which holds {place.fqn}"
        if place.fqn.startswith(prefix):
            pieces[info.relative_path].append((place.fqn, (info.offset, info.offset + info.length)))
    if meta.format == UNSEALED_FORMAT:
        return _damage_by_torch(step_dir, pieces)
    files = [
        (step_dir / name, meta.files[name], [span for _, span in found] if prefix else None)
        for name, found in pieces.items()
    ]
    return damaged_file(files, meta.block)


def _damage_by_torch(step_dir: Path, pieces: dict[str, list[tuple[str, Span]]]) -> str | None:
    """Check the tensors of a checkpoint without checksums of its own by the CRC-32 that torch.save put beside each."""

    def check(path: Path, name: str, span: Span) -> str | None:
        try:
            with path.open("rb") as file:
                file.seek(span[0])
                content = io.BytesIO(file.read(span[1] - span[0]))
            wrong = zipfile.ZipFile(content).testzip()
            content.seek(0)
            torch.load(content, map_location="meta", weights_only=True)  # no data; more of the framing than zipfile
        except Exception as error:  # of the file system, or whatever damaged framing makes zipfile and zlib raise
            return f"{path}: {name} cannot be read ({error})"
        return f"{path}: {name} has another checksum than when it was saved" if wrong else None

    work = [(step_dir / file, name, span) for file, found in pieces.items() for name, span in found]
    with ThreadPoolExecutor(THREADS) as pool:  # each holds one tensor (or one rank's shard of it)
        return next(filter(None, pool.map(lambda item: check(*item), work)), None)
