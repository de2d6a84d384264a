"""Measures the model in training: the loss on held-out sequences, and tasks if the run evaluates any."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from efla_data.loader.batches import ValidationLoader
from torch import nn

from efla_lm.parallel.distributed import World, reshard
from efla_lm.parallel.signals import Agreement, StopRequested
from efla_lm.training.step import count_targets, inputs_of

Evaluate = Callable[[Any, Callable[[], None]], dict[str, float]]  # (model, check) -> `eval/TASK/METRIC`
Row = Mapping[str, int | float | None]


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: ValidationLoader,
    world: World,
    max_sequences: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> float | None:
    """Mean loss per held-out target in nats, over all ranks; None if the sequences that are read have no targets.

    max_sequences: read about so many sequences from the start (rounded up to what all ranks read at once); None: all.
    check: called before each forward pass, equally often on all ranks; an exception that it raises ends the validation.
    All ranks make the same number of forward passes, as sharded weights need: the loader adds rows without targets.
    """
    per_batch = loader.micro_batch * world.size
    batches = loader.num_batches if max_sequences is None else min(loader.num_batches, -(-max_sequences // per_batch))
    sums = torch.zeros(2, dtype=torch.float64, device=world.device)
    was_training = model.training
    model.eval()
    try:
        for index in range(batches):
            check()
            batch = loader.batch(index)
            loss = model(**inputs_of(batch, world)).loss
            sums[0] += loss
            sums[1] += count_targets(batch)
    finally:
        model.train(was_training)
        reshard(model)  # a forward pass without a backward pass leaves the weights gathered
    total, targets = world.sum(sums).tolist()
    return total / targets if targets else None


def is_due(step: int, every: int | None) -> bool:
    """Whether something that is done every so many steps is done after `step`; None: never."""
    return every is not None and step % every == 0


@dataclass(frozen=True)
class Validation:
    """What is measured after which steps: `val_loss`, the held-out loss, and `eval`, the tasks.

    Both are measured after the last step too. loader, evaluate: None if the run has no held-out data, or no tasks.
    """

    world: World
    steps: int
    loader: ValidationLoader | None
    validate_every: int | None
    max_sequences: int | None
    evaluate: Evaluate | None
    evaluate_every: int | None
    agreement: Agreement

    def due(self, step: int) -> set[str]:
        """What is measured after `step`, by the first part of its keys in metrics.jsonl."""
        every = {}
        if self.loader is not None:
            every["val_loss"] = self.validate_every
        if self.evaluate is not None:
            every["eval"] = self.evaluate_every
        return {name for name, interval in every.items() if step == self.steps or is_due(step, interval)}

    def skipped(self, step: int, rows: Sequence[dict[str, Any]]) -> set[str]:
        """What an earlier launch of this run did not measure after `step`; rows: those of metrics.jsonl."""
        return self.due(step) - {name.partition("/")[0] for row in rows if row["step"] == step for name in row}

    def run(self, model: nn.Module, step: int, due: set[str], log: Callable[[int, Row], None]) -> bool:
        """Measure `due` after `step` and log a row for each. Returns False if a rank was asked to stop meanwhile: then
        all ranks have abandoned the same forward pass."""
        check = self.agreement.check
        try:
            if "val_loss" in due and self.loader is not None:
                log(step, {"val_loss": validate(model, self.loader, self.world, self.max_sequences, check)})
            if "eval" in due and self.evaluate is not None:
                log(step, self.evaluate(model, check))
            if due:
                self.agreement.settle()
        except StopRequested:
            return False
        return True
