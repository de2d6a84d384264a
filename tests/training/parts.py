"""Small models and batches for tests that call the training parts directly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from efla_data.loader.batches import Batch
from torch import nn

from efla_lm.models import EflaConfig, EflaForCausalLM, initialise
from efla_lm.parallel import distributed
from efla_lm.parallel.overlap import sum_in_backward
from efla_lm.training import optim
from efla_lm.training.step import train_step


def tiny_config(**fields: Any) -> EflaConfig:
    sizes = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 61}
    return EflaConfig(**{**sizes, "state_size": 16, "mamba_head_dim": 16, **fields})


def sharded(world: distributed.World, precision: str = "fp32", **fields: Any) -> EflaForCausalLM:
    with torch.device("meta"):
        model = EflaForCausalLM(tiny_config(**fields))
    mesh = distributed.build_mesh(world, "auto")
    distributed.shard_model(model, list(model.model.layers), mesh, precision)
    model.to_empty(device=world.device)
    initialise(model, 0)
    return model.train()


def whole(overlap: bool, **fields: Any) -> EflaForCausalLM:
    """The model as ranks of parallel=ddp hold it, with the weights of `sharded`."""
    model = EflaForCausalLM(tiny_config(**fields))
    initialise(model, 0)
    distributed.hold_whole(model, "fp32")
    if overlap:
        sum_in_backward(model, list(model.model.layers))
    return model.train()


def adamw(model: nn.Module, lr: float = 1e-2, weight_decay: float = 0.1) -> torch.optim.AdamW:
    optimizer = optim.build_optimizer(model, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay)
    optim.set_learning_rate(optimizer, lr)
    return optimizer


def ragged_batch(rows: int = 8, T: int = 24, seed: int = 0) -> Batch:
    """Rows with 1 to T targets: very unequal micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 61, (rows, T + 1), generator=generator)
    targets = ids[:, 1:].clone()
    for row in range(rows):
        targets[row, 1 + (5 * row) % T :] = -100
    return Batch(ids[:, :-1], targets, torch.arange(rows))


def cut(batch: Batch, size: int) -> list[Batch]:
    parts = (tensor.split(size) for tensor in (batch.input_ids, batch.targets, batch.sequence_ids))
    return [Batch(*part) for part in zip(*parts, strict=True)]


def not_finite_at(*calls: int) -> Callable[..., torch.Tensor]:
    """`train_step` as it is, but with NaN in the loss of the given calls (0-based)."""
    count = itertools.count()

    def poisoned(model, optimizer, batches, *args, **kwargs):  # type: ignore[no-untyped-def]
        if next(count) not in calls:
            return train_step(model, optimizer, batches, *args, **kwargs)
        plain, model.forward = model.forward, lambda **inputs: spoil(plain(**inputs))
        try:
            return train_step(model, optimizer, batches, *args, **kwargs)
        finally:
            model.forward = plain

    def spoil(output):  # type: ignore[no-untyped-def]
        output.loss = output.loss * float("nan")
        return output

    return poisoned
