"""Ctrl-C, SIGTERM and SIGHUP ask the run to stop. The loop saves and leaves at the end of the current step.

One rank alone may get the signal, so it cannot act on it alone. `Interruption.requested` is part of the all-reduce of
each step (`efla_lm.training.step`), so that all ranks leave after the same step. During a validation, which has no
steps, it is part of the all-reduce of `Agreement`.
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
    """A context that notes the first signal. A second Ctrl-C interrupts at once, without saving."""

    def __init__(self) -> None:
        self.requested = False
        self.reason = ""  # the signal's name, or a failed write, on the ranks that got it
        self.error: OSError | None = None  # the failed write
        self._handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> Interruption:
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def fail(self, error: OSError) -> None:
        """Ask to stop because a file of the run cannot be written; the run saves, and then raises the error."""
        self.requested, self.reason, self.error = True, "a failed write", self.error or error

    def raise_failure(self) -> None:
        """Raise the failed write, if there was one."""
        if self.error is not None:
            raise self.error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested, self.reason = True, signal.Signals(number).name


class StopRequested(Exception):
    """Some rank was asked to stop. All ranks raise it at the same place."""


class Agreement:
    """Lets all ranks leave a validation at the same forward pass once one of them was asked to stop.

    Sharded weights need every rank in every forward pass, so no rank may leave alone. `check`, called before each pass,
    starts a sum of the requests over the control group, on the host, and reads the sum that the last check started. It
    arrived while the pass between the two ran, so nothing waits for it. A single process needs no sum.
    """

    def __init__(self, interruption: Interruption, world: World) -> None:
        self._interruption, self._world = interruption, world
        self._sent: tuple[Tensor, dist.Work] | None = None

    def check(self) -> None:
        """Raise StopRequested if a rank was asked to stop before the last check. All ranks call it equally often."""
        self.settle()
        if self._world.size > 1:
            requests = torch.tensor([int(self._interruption.requested)])
            work = dist.all_reduce(requests, group=self._world.control, async_op=True)
            assert work is not None
            self._sent = requests, work

    def settle(self) -> None:
        """Read the sum that the last check started, and raise as `check` does. Call it after the last pass."""
        requested = self._world.size == 1 and self._interruption.requested
        if self._sent is not None:
            requests, work = self._sent
            self._sent = None
            work.wait()
            requested = requests.item() > 0
        if requested:
            raise StopRequested
