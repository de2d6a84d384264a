"""Keys of torch.compile's cache on disk that change with the source of our ops.

torch keys a compiled graph by the names of its ops and by its forward pass. A graph of an older efla_kernels, whose
backward op took other arguments, would have the key of the present one and fail in the first step.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import efla_kernels
import torch

SOURCE = Path(efla_kernels.__file__).parent


def source_tag(folder: Path = SOURCE) -> str:
    """A hash of the Python files under `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"efla-kernels-{digest.hexdigest()[:16]}"


def tag_caches() -> None:
    """Add the hash of our ops' source to torch's cache keys. A tag that the user set stays."""
    config, tag = torch.compiler.config, source_tag()
    if tag not in config.cache_key_tag:
        config.cache_key_tag += tag
