"""meta.json: what a checkpoint is, and the checksums of all its other files. It is written last.

Its last entry is the SHA-256 of the entries before it, and reading compares its text byte by byte with what would be
written. So one chain covers every byte of a checkpoint and names its run and step. Format 1 (2026) has sizes only.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.run.checksums import BLOCK, FileSum

FORMAT, UNSEALED_FORMAT = 2, 1
META = "meta.json"
DIGEST = "sha256"


@dataclass(frozen=True)
class CheckpointMeta:
    """What meta.json says. Paths in it are relative to the checkpoint, so that a run directory can be moved."""

    step: int  # updates done, which is also the index of the next one
    tokens: int  # positions consumed
    identity: dict[str, Any]
    skipped_steps: int = 0
    tokenizer: str = "../../tokenizer"
    world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    run: str = ""
    block: int = BLOCK  # bytes of a checksum
    files: dict[str, FileSum] = field(default_factory=dict)  # all other files of the checkpoint, by name
    format: int = FORMAT


_TYPES = {
    **dict.fromkeys(("step", "tokens", "skipped_steps", "world_size", "block", "format"), int),
    **dict.fromkeys(("identity", "versions", "files"), dict),
    **dict.fromkeys(("tokenizer", "run"), str),
}


def write_meta(step_dir: Path, meta: CheckpointMeta) -> None:
    """Write meta.json and flush it to the disk."""
    content = asdict(meta)
    with (step_dir / META).open("wb") as stream:
        stream.write(_text({**content, DIGEST: _digest(content)}))
        stream.flush()
        os.fsync(stream.fileno())


def read_meta(step_dir: Path) -> CheckpointMeta:
    """Read and check meta.json. Raises UserError naming the file where it is missing, damaged or of another format."""
    path = step_dir / META
    try:
        raw = path.read_bytes()
        return _checked(json.loads(raw), raw)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, so the checkpoint is not whole") from None
    except (ValueError, TypeError, RecursionError, OSError) as error:
        raise UserError(f"{path}: not a checkpoint description ({error})") from None


def _checked(content: Any, raw: bytes) -> CheckpointMeta:
    if not isinstance(content, dict) or content.get("format") not in (FORMAT, UNSEALED_FORMAT):
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"expected format {FORMAT}, got {got}")
    if content["format"] == FORMAT:
        digest = content.pop(DIGEST, None)
        if digest != _digest(content) or raw != _text({**content, DIGEST: digest}):
            raise ValueError("it is not as it was saved: its checksum is another")
    for name, kind in _TYPES.items():
        if name in content and (type(content[name]) is not kind or (kind is int and content[name] < 0)):
            raise ValueError(f"{name} should be of type {kind.__name__}, is {content[name]!r:.80}")
    files = {name: _file_sum(name, value) for name, value in content.get("files", {}).items()}
    if content.get("block") == 0 or (content["format"] == FORMAT and any(s.crc32 is None for s in files.values())):
        raise ValueError("its checksums are missing")
    return CheckpointMeta(**{**content, "files": files})


def _file_sum(name: str, value: Any) -> FileSum:
    sums = FileSum(value) if type(value) is int else FileSum(**value)
    numbers = [sums.bytes, *(sums.crc32 or [])]
    if name in ("", ".", "..") or Path(name).name != name or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"files: {name!r} with {value!r:.80}")
    return sums


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_text(content)).hexdigest()


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()
