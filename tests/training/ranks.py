"""Run by torchrun from test_ranks.py: a list of launches, one after the other in the same processes (imports are slow).

    ranks.py PLAN.json OUT      PLAN: [{"arguments": [...], "trouble": null or [kind, rank, call]}, ...]

Writes OUT/rank-R.json: the exit code of each launch on this rank. `trouble` makes one rank fail, or be told to stop, in
its n-th step (0-based), or in its save.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from efla_data.loader.batches import ValidationLoader
from torch.distributed.checkpoint import FileSystemWriter

import train
from efla_lm.parallel import distributed
from efla_lm.training import step, trainer
from tests.training.parts import adamw, cut, not_finite_at, ragged_batch, sharded, whole

RANK = int(os.environ["RANK"])


def signalled_at(call: int):  # type: ignore[no-untyped-def]
    count = itertools.count()

    def train_step(*args, **kwargs):  # type: ignore[no-untyped-def]
        if next(count) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return step.train_step(*args, **kwargs)

    return train_step


def signalled_at_batch(call: int):  # type: ignore[no-untyped-def]
    count, plain = itertools.count(), ValidationLoader.batch

    def batch(self: ValidationLoader, index: int):  # type: ignore[no-untyped-def]
        if next(count) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, index)

    return batch


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def launch(arguments: list[str], trouble: list | None) -> int | None:
    patches = [mock.patch.object(distributed, "finish")]  # the process group stays for the next launch
    if trouble is not None and trouble[1] == RANK:
        kind, _, call = trouble
        if kind == "nan":
            patches.append(mock.patch.object(trainer, "train_step", not_finite_at(*call)))
        elif kind == "signal":
            patches.append(mock.patch.object(trainer, "train_step", signalled_at(call)))
        elif kind == "signal in validation":
            patches.append(mock.patch.object(ValidationLoader, "batch", signalled_at_batch(call)))
        elif kind == "disk":
            patches.append(mock.patch.object(FileSystemWriter, "write_data", no_space))
    for patch in patches:
        patch.start()
    try:
        return train.main.run(arguments, program="train.py")
    except SystemExit as stop:
        return stop.code
    finally:
        mock.patch.stopall()


def collectives(cuts: int) -> dict[str, int]:
    """How often each collective runs in one step of `cuts` micro-batches on each rank."""
    world = distributed.start("cpu")
    model = sharded(world)
    optimizer, batches = adamw(model), cut(cut(ragged_batch(), 8 // world.size)[world.rank], 8 // world.size // cuts)
    counts: dict[str, int] = {}

    def counted(name: str):  # type: ignore[no-untyped-def]
        plain = getattr(dist, name)

        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            counts[name] = counts.get(name, 0) + 1
            return plain(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with contextlib.ExitStack() as patches:
        for name in ("reduce_scatter_tensor", "reduce_scatter_single", "all_reduce"):  # torch changed what FSDP calls
            if hasattr(dist, name):
                patches.enter_context(counted(name))
        step.train_step(model, optimizer, batches, world, replicas=1, clip_norm=1.0, stop=False)
    return counts


def ragged_steps() -> list[list[float]]:
    """Results of one step on a ragged batch of 8 rows, 8 / ranks on each (row C1): sharded; whole on every rank,
    with gradients summed in the backward pass and after it."""
    world = distributed.start("cpu")
    mine = cut(cut(ragged_batch(), 8 // world.size)[world.rank], 2)
    results = []
    for model, replicas in ((sharded(world), 1), (whole(True), world.size), (whole(False), world.size)):
        stop = world.rank == 1
        result = step.train_step(model, adamw(model), mine, world, replicas=replicas, clip_norm=None, stop=stop)
        results.append(result.tolist())
    return results


if __name__ == "__main__":
    plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    codes = [launch(item["arguments"], item["trouble"]) for item in plan]
    report = {"codes": codes, "ragged": ragged_steps(), "collectives": [collectives(cuts) for cuts in (1, 2)]}
    (out / f"rank-{RANK}.json").write_text(json.dumps(report))
    distributed.finish()
