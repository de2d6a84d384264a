"""A place for a result is tried before the work, not after it."""

import errno
import os
import tempfile
from pathlib import Path


def check_output(file: Path) -> None:
    """Make the folder of a file that is to be written, and see that it can be. Raises OSError as writing would."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{file.name}."):
        pass
