"""Copy a tokenizer: its own files and nothing else, and none that a link takes from outside the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

from efla_lm.errors import UserError

PATTERNS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")
SUFFIXES = (".json", ".model", ".txt")


def tokenizer_files(source: Path) -> list[Path]:
    """The files of a tokenizer in a folder. Raises UserError for a link that leaves the folder.

    In the hub's cache a snapshot's files are links into the same repository, which are admitted.
    """
    found = sorted({file for pattern in PATTERNS for file in source.glob(pattern) if file.suffix in SUFFIXES})
    folder = source.resolve()
    root = folder.parent.parent if folder.parent.name == "snapshots" else folder
    for file in found:
        if root not in file.resolve().parents:
            raise UserError(
                f"{file}: a link to {file.resolve()}, outside the folder; put a copy of the file in its place"
            )
    return [file for file in found if file.is_file()]


def copy_tokenizer(source: Path, folder: Path) -> bool:
    """Copy the tokenizer of one folder into another. Returns whether there is one."""
    files = tokenizer_files(source)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return bool(files)
