"""One point of `scripts.throughput`, in a process (or one process per device) of its own:

    python -m scripts.throughput.point SPEC.json OUT.json

SPEC holds a `Point`; rank 0 writes the figures to OUT. What is timed is the loop of train.py: the same parts, built by
the same functions from the same settings, on a file of random text. Nothing is saved or validated.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from efla_lm.models import flops_per_token
from efla_lm.parallel.cuda_graphs import release
from efla_lm.parallel.distributed import build_mesh, finish, start
from efla_lm.settings import TrainSettings, compose
from efla_lm.training import build, corpus, schedule
from efla_lm.training.batch_plan import plan_budget
from efla_lm.training.meter import peak_flops, peak_memory_gib
from efla_lm.training.optim import build_optimizer, set_learning_rate
from efla_lm.training.profile import Tracer
from efla_lm.training.step import Verdicts, update
from scripts.throughput.settings import STARTED


@dataclass(frozen=True)
class Point:
    """What is measured, and how long. `overrides` compose train.py's settings; `started` is the time of the launch."""

    model: str
    size: str
    impl: str
    batch: int  # windows of a device
    tokens: int
    gpus: int
    parallel: str
    overrides: list[str]
    warmup: int
    windows: int
    updates: int
    profile: int
    peer_waits: bool  # fla reads norm and loss in every update (`train_peer`)
    started: float
    lock: str  # a file by which points on one GPU take turns; empty: nobody else is there


class Subject(Protocol):
    """Something that trains."""

    parameters: int  # without an untied embedding table
    flops: float  # per token, the mixer's included
    batch_tokens: int
    device: torch.device
    world_size: int
    is_main: bool

    def step(self, number: int) -> None:
        """Queue update `number` (from 0)."""

    def settle(self) -> float:
        """Wait for all updates; the loss of the last one."""

    def close(self) -> None:
        """Let go of what must be gone before the process group is."""


class Ours:
    """The parts of train.py, from the settings on."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.world = world = start(settings.train.device, settings.parallel.world_size)
        self.budget = plan_budget(settings.train, settings.data.context, world.size)
        mesh = build_mesh(world, settings.parallel.mode, settings.parallel.replicate, settings.parallel.shard)
        data = corpus.open_corpus(settings.data, world)
        config = build.build_config(settings, data.first)
        build.backend_in_use(config, world.device)
        self.data, _ = corpus.build_loaders(settings, self.budget, data, world)
        self.model = build.build_model(settings, config, world, mesh)
        self.optimizer = build_optimizer(self.model, **asdict(settings.optim))
        self.verdicts = Verdicts(settings.train.max_skipped_steps)
        self.replicas, self.passes = mesh["replicate"].size(), build.build_passes(settings, world)
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        self.parameters = sum(p.numel() for p in self.model.parameters()) - embedding
        self.flops = flops_per_token(config, self.budget.context)
        self.batch_tokens, self.device = self.budget.batch_tokens, world.device
        self.world_size, self.is_main = world.size, world.is_main

    def step(self, number: int) -> None:
        budget = self.budget
        tokens = number * budget.batch_tokens
        lr = schedule.learning_rate(self.settings.schedule, tokens, budget.total_tokens, budget.batch_tokens)
        set_learning_rate(self.optimizer, lr)
        batches = [self.data.batch(number, micro) for micro in range(budget.micro_steps)]
        verdict = update(
            self.model, self.optimizer, batches, self.world,
            replicas=self.replicas, clip_norm=self.settings.train.clip_norm, stop=False, passes=self.passes,
        )  # fmt: skip
        self.verdicts.add(number + 1, verdict)

    def settle(self) -> float:
        return self.verdicts.settle().loss

    def close(self) -> None:
        release(self.passes)


def measure(subject: Subject, point: Point) -> dict[str, Any]:
    """Warm up, then time `windows` times `updates` updates; the columns of a row (module `train_speed`)."""
    begin = time.time()
    built = begin - point.started  # of the start-up: imports, devices, data, initial weights
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
    """Hold the file `lock`, alone or among others that are not alone either, and say how many seconds one waited."""
    with ExitStack() as stack:
        begin = time.time()
        if lock:
            file = stack.enter_context(open(lock, "w", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing leaves it to processes forked meanwhile
        yield time.time() - begin


def clocked(subject: Subject, point: Point) -> dict[str, Any]:
    """The columns that are measured after `warmup` updates."""
    number, marks = point.warmup, []
    for window in range(point.windows + 1):  # the first update finds an idle device and is not counted
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
        found = tracer.stop(point.profile)
        where = {"where": found.row(), "kernels": found.top}
        print(found.text(), flush=True)
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
    """A time stamp behind all that is queued. On a GPU the device takes it, and nobody waits, as in training."""
    if subject.device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    subject.settle()
    return time.perf_counter()


def seconds(first: torch.cuda.Event | float, second: torch.cuda.Event | float) -> float:
    """Between two marks that have been reached."""
    if isinstance(first, torch.cuda.Event) and isinstance(second, torch.cuda.Event):
        return 1e-3 * first.elapsed_time(second)
    assert isinstance(first, float) and isinstance(second, float)
    return second - first


def main(spec: Path, out: Path) -> None:
    """Measure the point of `spec`."""
    point = Point(**json.loads(spec.read_text(encoding="utf-8")))
    settings = compose("train", point.overrides, TrainSettings)
    subject: Subject
    if point.impl == "efla_lm":
        subject = Ours(settings)
    else:
        from scripts.throughput.peer import Peer

        subject = Peer(point, settings)
    with closing(subject):
        figures = measure(subject, point)
    if subject.is_main:
        partial = out.with_suffix(".tmp")
        partial.write_text(json.dumps(figures), encoding="utf-8")
        partial.rename(out)
    finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
