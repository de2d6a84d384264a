"""One training step: gradients of a global batch, agreement of all ranks, an optimiser step or none.

With s_i the summed loss of micro-batch i on rank r and n the number of targets in the whole global batch (all
micro-batches of all ranks),

    loss = (1/n) sum_{i,r} s_i        gradient = (1/n) sum_{i,r} grad s_i

however the batch is cut into micro-batches and ranks, and however unequal their numbers of targets. The logged loss is
this same number. One all-reduce after the backward pass carries the loss, the squared gradient norm and the requests to
stop. From its result every rank decides alike, on its device, whether to take the step: a batch without targets and a
loss or gradient that is not finite are skipped. The host reads the result later (`StepResults`), so that it never waits
for the device between steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from efla_data.loader.batches import IGNORE, Batch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import AdamW

from efla_lm.errors import UserError
from efla_lm.parallel.cuda_graphs import ForwardBackward, eager_forward_backward
from efla_lm.parallel.distributed import World, reduce_whole
from efla_lm.parallel.overlap import sums_of
from efla_lm.training.optim import squared_norm, step_unless


def train_step(
    model: nn.Module,
    optimizer: AdamW,
    batches: Sequence[Batch],
    world: World,
    *,
    replicas: int,
    clip_norm: float | None,
    stop: bool,
    forward_backward: ForwardBackward = eager_forward_backward,
) -> Tensor:
    """Forward and backward pass of this rank's micro-batches, then one clipped optimiser step, or none (see above).

    replicas: size of the mesh dimension `replicate`. stop: whether this rank was asked to stop. Returns the result,
    equal on all ranks, float64 [4] on the device: loss, gradient norm before clipping, 1 if the step was skipped, the
    number of ranks that were asked to stop.
    """
    ours = float(sum(count_targets(batch) for batch in batches))
    counted = torch.full((), ours, dtype=torch.float64, device=world.device)  # a copy would make the host wait
    targets = world.sum(counted).clamp(min=1.0)  # without targets the loss is 0 and the step is skipped
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    for micro, batch in enumerate(batches):
        _reduce_gradients(model, last=micro == len(batches) - 1)
        loss += forward_backward(model, inputs_of(batch, world), targets, micro == 0).double() / targets
    reduce_whole(model, world)
    squared = squared_norm(model, replicas=replicas, world_size=world.size)
    loss, squared, stops = world.sum(torch.stack([loss, squared, torch.full_like(loss, float(stop))]))
    norm = squared.sqrt()
    skip = ~((loss + norm).isfinite() & (counted > 0))
    step_unless(optimizer, skip, norm, clip_norm or 0.0)
    return torch.stack([loss, norm, skip.double(), stops])


@dataclass(frozen=True)
class StepResult:
    """The result of a step, on the host."""

    step: int
    loss: float  # NaN for a batch without targets
    grad_norm: float
    skipped: bool
    stop: bool


class StepResults:
    """Reads the results of `train_step` without holding up the device, and counts the skipped steps.

    On a GPU a result is read once that of the next step is queued: the host stays one step ahead. All ranks read the
    results after the same steps, so that all of them leave after the same step. Raises UserError once `max_skipped`
    steps in a row were skipped.
    """

    def __init__(self, max_skipped: int, skipped: int = 0) -> None:
        self.skipped = skipped  # in the whole run
        self.stop = False
        self.last: StepResult | None = None
        self._max_skipped = max_skipped
        self.in_a_row = 0  # skipped steps at the end
        self._waiting: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def add(self, step: int, result: Tensor) -> None:
        """Take the result of `step` (from 1) and read what is due."""
        event = None
        if result.is_cuda:
            host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
            host.copy_(result, non_blocking=True)
            event, result = torch.cuda.Event(), host
            event.record()
        self._waiting.append((step, result, event))
        while len(self._waiting) > (1 if event else 0):
            self._read()

    def settle(self) -> StepResult:
        """Wait for all results and return the newest. There must be at least one."""
        while self._waiting:
            self._read()
        assert self.last is not None, "settle() before the first step"
        return self.last

    def _read(self) -> None:
        step, values, event = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        loss, norm, skipped, stops = values.tolist()
        no_targets = skipped > 0 and loss == norm == 0.0  # a mean of no losses
        self.last = StepResult(step, math.nan if no_targets else loss, norm, skipped > 0, stops > 0)
        self.stop |= self.last.stop
        self.skipped += self.last.skipped
        self.in_a_row = self.in_a_row + 1 if self.last.skipped else 0
        if self.in_a_row >= self._max_skipped:
            if no_targets:
                raise UserError(
                    f"{self.in_a_row} steps in a row were skipped, and the batch of the last one, step {step}, has no "
                    "targets: check the data, or raise train.max_skipped_steps"
                )
            raise UserError(
                f"{self.in_a_row} steps in a row were not finite, the last one at step {step} (loss {loss}, "
                f"gradient norm {norm}); the weights are as before them. Continue from a checkpoint with a lower "
                "schedule.peak or train.clip_norm, or raise train.max_skipped_steps"
            )


def _reduce_gradients(model: nn.Module, last: bool) -> None:
    """Let the last micro-batch sum the gradients over ranks; those before it add up on their rank."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
    elif (sums := sums_of(model)) is not None:
        sums.active = last


def inputs_of(batch: Batch, world: World) -> dict[str, Tensor | None]:
    """The arguments of the model for a batch, on the device."""
    boundaries = None if batch.cu_seqlens is None else _move(batch.cu_seqlens, world)
    return {
        "input_ids": _move(batch.input_ids, world),
        "targets": _move(batch.targets, world),
        "cu_seqlens": boundaries,
    }


def count_targets(batch: Batch) -> int:
    """How many targets of a batch count in the loss."""
    return int(np.count_nonzero(batch.targets.numpy() != IGNORE))


def _move(tensor: Tensor, world: World) -> Tensor:
    """Copy a tensor of the host to the device; the host does not wait for the copy.

    Here and in `count_targets` numpy does the host's share. From 32,768 elements on torch would wake its whole pool of
    threads for it, which takes milliseconds if there are more threads than free cores, while the device waits.
    """
    if world.device.type == "cpu":
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(staged.numpy(), tensor.numpy())
    return staged.to(world.device, non_blocking=True)
