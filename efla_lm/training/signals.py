"""Ctrl-C and SIGTERM ask the run to stop; the loop saves and leaves at the end of the update it is in.

A process that is alone in getting the signal cannot act on it alone: `Interruption.requested` goes into the
all-reduce of the step (`efla_lm.training.step`), so that all ranks leave after the same update.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """Context in which the first signal is only noted; a second Ctrl-C interrupts at once, without saving."""

    def __init__(self) -> None:
        self.requested = False
        self.reason = ""  # SIGTERM or SIGINT, on the ranks that got it
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested, self.reason = True, signal.Signals(number).name
