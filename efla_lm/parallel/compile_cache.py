"""Compiled graphs that torch keeps on disk, told apart by the source of our ops.

The keys of its caches know an op by its name and see its forward pass alone. A graph of an earlier efla_kernels, whose
backward op took other arguments, would be taken for today's and fail in the first update.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import efla_kernels
import torch

SOURCE = Path(efla_kernels.__file__).parent


def source_tag(folder: Path = SOURCE) -> str:
    """A name for the Python files under `folder` as they are."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"efla-kernels-{digest.hexdigest()[:16]}"


def tag_caches() -> None:
    """Make the source of our ops a part of the keys, beside what a user has put there."""
    config, tag = torch.compiler.config, source_tag()
    if tag not in config.cache_key_tag:
        config.cache_key_tag += tag
