"""A line of progress: one that is written over on a terminal, one every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Progress of something that is called `name`, on stderr."""

    def __init__(self, name: str = "") -> None:
        self.prefix = f"{name}: " if name else ""
        self.start = self.last = time.monotonic()
        self.is_terminal = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Write the text, unless the last one was written less than ten seconds ago to something but a terminal."""
        now = time.monotonic()
        if self.is_terminal:
            print(f"\r\033[K{self.prefix}{text}", end="", file=sys.stderr, flush=True)
        elif now - self.last >= 10:
            self.last = now
            print(f"{self.prefix}{text}", file=sys.stderr, flush=True)

    def step(self, step: int, steps: int, loss: float) -> None:
        """A training step, with an estimate of the time left."""
        left = (time.monotonic() - self.start) / step * (steps - step)
        self.show(f"step {step} of {steps}, median loss {loss:.3f}, {left:.0f} s left")

    def end(self, text: str = "") -> None:
        """Clear a terminal's line; write a last text that stays."""
        clear = "\r\033[K" if self.is_terminal else ""
        if clear or text:
            last = f"{self.prefix}{text}\n" if text else ""
            print(f"{clear}{last}", end="", file=sys.stderr, flush=True)
