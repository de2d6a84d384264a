"""One update: gradients of a global batch, agreement of all ranks, a step or none.

With s_i the summed loss of micro-batch i on rank r and n the valid targets of the whole global batch (all
micro-batches of all ranks),

    loss = (1/n) sum_{i,r} s_i        gradient = (1/n) sum_{i,r} grad s_i

whatever the cut into micro-batches and ranks and however unequal their valid targets. The loss that is logged is this
same number. One all-reduce after the backward pass carries the loss, the squared gradient norm and the wish to stop;
from its result every rank decides alike, on its device, whether the update is finite and is taken. The host reads the
verdict later (`Verdicts`), so that it never waits for the device between updates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from efla_data.loader.batches import IGNORE, Batch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW

from efla_lm.errors import UserError
from efla_lm.parallel.cuda_graphs import Inputs, run_eagerly
from efla_lm.parallel.distributed import World, reduce_whole
from efla_lm.parallel.overlap import sums_of
from efla_lm.training.optim import squared_norm, step_unless

Passes = Callable[[nn.Module, Inputs, Tensor, bool], Tensor]


def update(
    model: nn.Module,
    optimizer: AdamW,
    batches: Sequence[Batch],
    world: World,
    *,
    replicas: int,
    clip_norm: float | None,
    stop: bool,
    passes: Passes = run_eagerly,
) -> Tensor:
    """Gradients of this rank's micro-batches, then one optimiser step, or none if loss or gradient are not finite.

    replicas: size of the mesh dimension `replicate`. stop: whether this rank was asked to stop. passes: how forward and
    backward are run (`parallel.cuda_graphs`). Returns the verdict, equal on all ranks, float64 [4] on the device:
    loss, gradient norm (before clipping), 1 if the step was skipped, the number of ranks that ask to stop.
    """
    mine = float(sum(count_targets(batch) for batch in batches))
    valid = torch.full((), mine, dtype=torch.float64, device=world.device)  # filled there: a copy would be waited for
    valid = world.sum(valid).clamp(min=1.0)  # a batch without targets: loss 0 and no gradient, instead of 0/0
    share = torch.zeros((), dtype=torch.float64, device=world.device)
    for micro, batch in enumerate(batches):
        _reduce_gradients(model, last=micro == len(batches) - 1)
        share += passes(model, inputs_of(batch, world), valid, micro == 0).double() / valid
    reduce_whole(model, world)
    squared = squared_norm(model, replicas=replicas, world_size=world.size)
    wish = torch.full_like(share, float(stop))
    total, squared, wishes = world.sum(torch.stack([share, squared, wish]))
    norm = squared.sqrt()
    skip = ~(total.isfinite() & norm.isfinite())
    step_unless(optimizer, skip, norm, clip_norm or 0.0)
    return torch.stack([total, norm, skip.double(), wishes])


@dataclass(frozen=True)
class Verdict:
    """What an update came to, on the host."""

    step: int
    loss: float
    grad_norm: float
    skipped: bool
    stop: bool


class Verdicts:
    """Reads the verdicts of `update` without holding up the device, and counts the skipped steps.

    On a GPU the newest verdict is left in flight and read after the next update was queued; `settle()` reads all. Which
    verdicts are read when is the same on every rank, so that all ranks leave after the same update.
    Raises UserError once `max_skipped` updates in a row were skipped.
    """

    def __init__(self, max_skipped: int, skipped: int = 0) -> None:
        self.skipped = skipped  # in the whole run
        self.stop = False
        self.last: Verdict | None = None
        self._max_skipped = max_skipped
        self.in_a_row = 0
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, verdict: Tensor) -> None:
        """Take the verdict of `step`; read those that are due."""
        event = None
        if verdict.is_cuda:
            host = torch.empty(verdict.shape, dtype=verdict.dtype, pin_memory=True)
            host.copy_(verdict, non_blocking=True)
            event, verdict = torch.cuda.Event(), host
            event.record()
        self._waiting.append((step, verdict, event))
        while len(self._waiting) > (1 if event else 0):
            self._read()

    def settle(self) -> Verdict:
        """Wait for all verdicts and return the newest. Needs at least one."""
        while self._waiting:
            self._read()
        assert self.last is not None, "settle() before the first update"
        return self.last

    def _read(self) -> None:
        step, values, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        loss, norm, skipped, wishes = values.tolist()
        self.last = Verdict(step, loss, norm, skipped > 0, wishes > 0)
        self.stop |= self.last.stop
        self.skipped += self.last.skipped
        self.in_a_row = self.in_a_row + 1 if self.last.skipped else 0
        if self.in_a_row >= self._max_skipped:
            raise UserError(
                f"{self.in_a_row} updates in a row were not finite, the last one at step {step} (loss {loss}, "
                f"gradient norm {norm}); the weights are as before them. Continue from a checkpoint with a lower "
                "schedule.peak or train.clip_norm, or raise train.max_skipped_steps"
            )


def _reduce_gradients(model: nn.Module, last: bool) -> None:
    """Sum gradients over ranks with the last micro-batch only; before it they add up where they are."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    elif (sums := sums_of(model)) is not None:
        sums.wanted = last


def inputs_of(batch: Batch, world: World) -> dict[str, Tensor | None]:
    """A batch on the device, as the model takes it."""
    boundaries = None if batch.cu_seqlens is None else _move(batch.cu_seqlens, world)
    return {
        "input_ids": _move(batch.input_ids, world),
        "targets": _move(batch.targets, world),
        "cu_seqlens": boundaries,
    }


def count_targets(batch: Batch) -> int:
    """How many of a batch's targets count in the loss."""
    return int(np.count_nonzero(batch.targets.numpy() != IGNORE))


def _move(tensor: Tensor, world: World) -> Tensor:
    """A tensor of the host on the device, which copies it when it comes to it.

    Here and in `count_targets` numpy does the host's share: from 32,768 elements on torch would wake its whole pool of
    threads for it, milliseconds each time where there are more threads than free cores, while the device waits.
    """
    if world.device.type == "cpu":
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(staged.numpy(), tensor.numpy())
    return staged.to(world.device, non_blocking=True)
