"""Mean loss over the held-out windows, in nats per token, exactly weighted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from efla_data.loader import SequentialLoader
from torch import nn

from efla_lm.training.distributed import World, reshard
from efla_lm.training.step import count_targets, inputs_of


@torch.no_grad()
def validate(
    model: nn.Module,
    loader: SequentialLoader,
    world: World,
    max_windows: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> float | None:
    """Loss per held-out target: the sums of loss and of targets over all ranks, divided once.

    max_windows: read about so many windows from the start (rounded up to what all ranks read at once), or all (None).
    stop: asked before every batch; once it is true on one rank, all break off, and the result is None.
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
            if any(world.gather(stop())):
                return None
            batch = loader.batch(index)
            loss = model(**inputs_of(batch, world)).loss
            sums[0] += loss
            sums[1] += count_targets(batch)
    finally:
        model.train(was_training)
        reshard(model)  # a forward pass without a backward one leaves the weights gathered
    total, targets = world.sum(sums).tolist()
    return total / targets if targets else float("nan")
