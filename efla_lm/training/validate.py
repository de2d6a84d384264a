"""Mean loss over the held-out windows, in nats per token, exactly weighted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from efla_data.loader.batches import ValidationLoader
from torch import nn

from efla_lm.parallel.distributed import World, reshard
from efla_lm.training.step import count_targets, inputs_of


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: ValidationLoader,
    world: World,
    max_windows: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> float:
    """Loss per held-out target: the sums of loss and of targets over all ranks, divided once.

    max_windows: read about so many windows from the start (rounded up to what all ranks read at once), or all (None).
    check: called before each forward pass, equally often on all ranks; what it raises ends the validation.
    All ranks make the same number of forward passes, as sharded weights need; the loader pads with rows without
    targets.
    """
    per_batch = loader.micro_batch * world.size
    batches = loader.num_batches if max_windows is None else min(loader.num_batches, -(-max_windows // per_batch))
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
        reshard(model)  # a forward pass without a backward one leaves the weights gathered
    total, targets = world.sum(sums).tolist()
    return total / targets if targets else float("nan")
