"""Standard output that may go away: `| head`, a `tee` that Ctrl-C ended, a full disk, a closed terminal.

A failed print must not end a run before it saves, so the first failure silences the stream.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Lasting:
    """A text stream whose writing never fails; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._gone = stream, False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Any) -> None:
        if self._gone:
            return
        try:
            act()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._gone = True
            with contextlib.suppress(OSError, ValueError):  # else Python flushes what is left at the end, and fails
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Context in which writing to stdout and stderr never raises."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        sys.stdout, sys.stderr = before
