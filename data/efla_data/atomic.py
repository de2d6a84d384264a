"""Files that appear whole: a reader sees the old content or the new one, never a part."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a small file: under another name, flushed to disk, then renamed. Its folder must exist."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path), open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block: for a file that is already open the system's error names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
