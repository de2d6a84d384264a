"""Ctrl-C, SIGTERM and SIGHUP ask the run to stop; the loop saves and leaves at the end of the update it is in.

A process that is alone in getting the signal cannot act on it alone: `Interruption.requested` goes into the
all-reduce of the step (`efla_lm.training.step`), so that all ranks leave after the same update, and into that of
`Agreement` where forward passes are made without updates.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from efla_lm.parallel.distributed import World

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interruption:
    """Context in which the first signal is only noted; a second Ctrl-C interrupts at once, without saving."""

    def __init__(self) -> None:
        self.requested = False
        self.reason = ""  # the signal's name, or a failed write, on the ranks that got it
        self.error: OSError | None = None  # the failed write
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def fail(self, error: OSError) -> None:
        """Ask to stop because a file of the run cannot be written; the run saves, and then raises the error."""
        self.requested, self.reason, self.error = True, "a failed write", self.error or error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested, self.reason = True, signal.Signals(number).name


class StopAsked(Exception):
    """Some rank was asked to stop; raised on all of them alike."""


class Agreement:
    """Lets all ranks leave a validation at the same forward pass once one of them was asked to stop.

    Sharded weights need every rank in every pass, so no rank may leave alone. `check`, called before each pass, starts
    a sum of the wishes over the control group, on the host, and reads the one of the check before: it came in while the
    pass between them ran, so that nobody waits for it. A single process has nobody to ask.
    """

    def __init__(self, interruption: Interruption, world: World) -> None:
        self._interruption, self._world = interruption, world
        self._sent: tuple[Tensor, dist.Work] | None = None

    def check(self) -> None:
        """Raise StopAsked where a rank had been asked to stop by the check before. Ranks call it equally often."""
        self.settle()
        if self._world.size > 1:
            wishes = torch.tensor([int(self._interruption.requested)])
            work = dist.all_reduce(wishes, group=self._world.control, async_op=True)
            assert work is not None
            self._sent = wishes, work

    def settle(self) -> None:
        """Read what the last check sent, and raise as `check` does; all ranks call it after the last pass."""
        asked = self._world.size == 1 and self._interruption.requested
        if self._sent is not None:
            wishes, work = self._sent
            self._sent = None
            work.wait()
            asked = wishes.item() > 0
        if asked:
            raise StopAsked
