"""One point of `scripts.throughput`, in a process (or one process per device) of its own:

    python -m scripts.throughput.point SPEC.json OUT.json

SPEC holds a `Point`; rank 0 writes the figures to OUT. It times the trainer of train.py, assembled from the same
settings, on a file of random text. Nothing is saved or validated.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from efla_data.atomic import write_atomically

from efla_lm.parallel.distributed import leaving_process_group
from efla_lm.settings import TrainSettings, compose
from efla_lm.training.meter import peak_flops, peak_memory_gib
from efla_lm.training.profile import Tracer
from efla_lm.training.trainer import Setup, assemble, set_up
from scripts.throughput.settings import STARTED


@dataclass(frozen=True)
class Point:
    """What is measured, and how long. `overrides` compose the settings of train.py; `started` is the launch time."""

    model: str
    size: str
    impl: str
    batch: int  # sequences of a device
    tokens: int
    gpus: int
    parallel: str
    overrides: list[str]
    warmup: int
    windows: int
    updates: int
    profile: int
    peer_waits: bool  # whether fla reads norm and loss in every step (`scripts.throughput.peer`)
    started: float
    lock: str  # a file by which points on one GPU take turns; empty: this point is alone


class Subject(Protocol):
    """A model that is trained step by step."""

    parameters: int  # without an untied embedding table
    flops: float  # per token, those of the mixer included
    batch_tokens: int
    device: torch.device
    world_size: int
    is_main: bool

    def step(self, number: int) -> None:
        """Queue step `number` (from 0)."""

    def settle(self) -> float:
        """Wait for all steps; return the loss of the last one."""

    def close(self) -> None:
        """Free what must be gone before the process group ends."""


class Prepared:
    """What both subjects have in common: the processes, batches, learning rate and figures of a `Setup`."""

    def __init__(self, setup: Setup, parameters: int) -> None:
        self.setup = setup
        config = setup.config
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        self.parameters = parameters - embedding
        self.flops, self.batch_tokens = setup.flops_per_token, setup.plan.batch_tokens
        self.device, self.world_size, self.is_main = setup.world.device, setup.world.size, setup.world.is_main


class Ours(Prepared):
    """The trainer of train.py."""

    def __init__(self, settings: TrainSettings) -> None:
        setup = set_up(settings)
        self.trainer = assemble(settings, setup)
        super().__init__(setup, sum(p.numel() for p in self.trainer.model.parameters()))

    def step(self, number: int) -> None:
        """See `Subject`."""
        self.trainer.set_learning_rate(number)
        self.trainer.step(number, self.setup.batches(number))

    def settle(self) -> float:
        """See `Subject`."""
        return self.trainer.results.settle().loss

    def close(self) -> None:
        """See `Subject`."""
        self.trainer.close()


def measure(subject: Subject, point: Point) -> dict[str, Any]:
    """Warm up, then time `windows` spans of `updates` steps; columns of a row (`scripts.throughput.speed`)."""
    begin = time.time()
    built = begin - point.started  # the start-up: imports, devices, data, initial weights
    with turn(point.lock, alone=False) as compiling:
        subject.step(0)
        subject.settle()
    first = time.time() - begin - compiling
    with turn(point.lock, alone=True) as timing:
        for number in range(1, point.warmup):
            subject.step(number)
            if number + 1 == STARTED:
                subject.settle()
                startup = time.time() - point.started - compiling - timing
        return clocked(subject, point) | {"startup_s": startup, "built_s": built, "first_update_s": first}


@contextmanager
def turn(lock: str, alone: bool) -> Iterator[float]:
    """Hold the file `lock`, exclusively or shared, and yield how many seconds the wait for it took."""
    with ExitStack() as stack:
        begin = time.time()
        if lock:
            file = stack.enter_context(open(lock, "w", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # a process forked meanwhile keeps the file open
        yield time.time() - begin


def clocked(subject: Subject, point: Point) -> dict[str, Any]:
    """The columns that are measured after `warmup` steps."""
    number, marks = point.warmup, []
    for window in range(point.windows + 1):  # the first step finds an idle device and does not count
        for _ in range(point.updates if window else 1):
            subject.step(number)
            number += 1
        marks.append(mark(subject))
    loss = subject.settle()
    rates = [point.updates * subject.batch_tokens / seconds(*pair) for pair in pairwise(marks)]
    where = {}
    if point.profile:
        tracer = Tracer(subject.device)
        tracer.start()
        for extra in range(point.profile):
            subject.step(number + extra)
        breakdown = tracer.stop(point.profile)
        where = {"where": breakdown.row(), "kernels": breakdown.top}
        print(breakdown.text(), flush=True)
    rate, peak = statistics.median(rates), peak_flops(subject.device)
    spread = statistics.quantiles(rates, n=4) if len(rates) > 1 else rates * 3
    of_peak = None if peak is None else rate / (peak * subject.world_size)
    cuda = subject.device.type == "cuda"
    return {
        "tokens_per_second": rate,
        "tokens_per_second_quartiles": [spread[0], spread[2]],
        "step_ms": 1e3 * subject.batch_tokens / rate,
        "mfu": of_peak and of_peak * 6 * subject.parameters,
        "mfu_with_mixing": of_peak and of_peak * subject.flops,
        "peak_gib": peak_memory_gib(subject.device),
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if cuda else None,
        "loss": loss,
        "loss_after": number,
        **where,
    }


def mark(subject: Subject) -> torch.cuda.Event | float:
    """A time stamp after everything that is queued. A GPU takes it itself, so that the host does not wait."""
    if subject.device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    subject.settle()
    return time.perf_counter()


def seconds(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    """Seconds between two marks that the device has reached."""
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return 1e-3 * first.elapsed_time(second)
    assert isinstance(first, float) and isinstance(second, float)
    return second - first


def main(spec: Path, out: Path) -> None:
    """Measure the point of `spec`."""
    point = Point(**json.loads(spec.read_text(encoding="utf-8")))
    settings = compose("train", point.overrides, TrainSettings)
    with leaving_process_group():
        subject: Subject
        if point.impl == "efla_lm":
            subject = Ours(settings)
        else:
            from scripts.throughput.peer import Peer

            subject = Peer(point, settings)
        with closing(subject):
            figures = measure(subject, point)
        if subject.is_main:
            write_atomically(out, json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
