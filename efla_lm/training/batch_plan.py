"""The arithmetic of batches: tokens, sequences, micro-batches and steps. A token is a position.

batch_tokens = context * sequences of a global batch
sequences of a global batch = micro_batch * micro_steps * world_size
tokens seen after n steps = n * batch_tokens
"""

from __future__ import annotations

from dataclasses import dataclass

from efla_lm.errors import UserError
from efla_lm.settings import LoopSettings


@dataclass(frozen=True)
class BatchPlan:
    """Sizes that follow from the settings and the number of processes."""

    context: int
    batch_tokens: int
    micro_batch: int  # sequences that a device takes at once
    micro_steps: int  # micro-batches per step and device
    steps: int  # of the whole run

    @property
    def sequences(self) -> int:
        """Sequences of a global batch."""
        return self.batch_tokens // self.context

    @property
    def total_tokens(self) -> int:
        return self.steps * self.batch_tokens


def plan_batches(train: LoopSettings, context: int, world_size: int) -> BatchPlan:
    """Work out the batch and the length of the run. Raises UserError with the figures if they do not divide."""
    sequences = train.sequences(context)
    if sequences % world_size:
        raise UserError(
            f"train.batch_tokens={train.batch_tokens} is {sequences} sequences of data.context={context}, which "
            f"{world_size} processes cannot share evenly: change train.batch_tokens or the number of processes"
        )
    per_rank = sequences // world_size
    micro = train.micro_batch if train.micro_batch is not None else _largest_cut(per_rank, train.micro_tokens, context)
    if micro < 1 or per_rank % micro:
        raise UserError(
            f"train.micro_batch={micro}: each of {world_size} process(es) has {per_rank} sequences per step, which "
            "must be a multiple of it"
        )
    if (train.steps is None) == (train.tokens is None):
        raise UserError(f"give one of train.steps and train.tokens, got steps={train.steps}, tokens={train.tokens}")
    steps = train.steps if train.steps is not None else -(-(train.tokens or 0) // train.batch_tokens)
    if steps < 1:
        raise UserError(f"nothing to train: train.steps={train.steps}, train.tokens={train.tokens}")
    return BatchPlan(context, train.batch_tokens, micro, per_rank // micro, steps)


def _largest_cut(per_rank: int, micro_tokens: int | None, context: int) -> int:
    """The most sequences at once within micro_tokens that divide the share of a rank; at least one."""
    if micro_tokens is None:
        raise UserError("give one of train.micro_batch and train.micro_tokens, got neither")
    most = max(1, min(per_rank, micro_tokens // context))
    return next(size for size in range(most, 0, -1) if per_rank % size == 0)
