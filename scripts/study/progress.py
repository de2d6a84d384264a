"""Progress of a stack that trains."""

from __future__ import annotations

import sys
import time


class Line:
    """One line that is written over on a terminal, a line every ten seconds elsewhere; call it with the step."""

    def __init__(self, name: str) -> None:
        self.name, self.start = name, time.monotonic()
        self.last = self.start

    def __call__(self, step: int, steps: int, loss: float) -> None:
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if not terminal and now - self.last < 10:
            return
        self.last = now
        left = (now - self.start) / step * (steps - step)
        text = f"{self.name}: step {step} of {steps}, median loss {loss:.3f}, {left:.0f} s left"
        print(f"\r\033[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    def end(self, text: str) -> None:
        """A last line that stays."""
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{clear}{self.name}: {text}", file=sys.stderr, flush=True)
