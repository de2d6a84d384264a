"""Ranks that hold the whole model sum their gradients while the backward pass is running.

    g <- sum_r g_r        over ranks r, in place, fp32, one collective per block

The gradients of a block are complete long before the pass ends: those of the last block right after the loss, that of
the embedding at the very end. The sum of a block starts when its gradients are complete, on the communication stream of
the process group, and the pass continues meanwhile. Only the sum of the embedding is waited for. A CUDA graph records
the collectives with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn


class GradientSums:
    """Sums the gradients of `groups`, listed in the order of the forward pass, in the last backward pass of a step.

    active: whether the next backward pass is the last one of its step; in the others gradients only add up on their
    rank. The caller of the backward pass calls `finish` after it.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.active = False
        # All ranks must start the collectives in one order, that of the backward pass, whichever gradient comes first.
        self._groups = [list(group) for group in reversed(groups)]
        self._works: list[dist._CoalescingManager] = []
        self._reset()
        for index, group in enumerate(self._groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(partial(self._count, index))

    def finish(self) -> None:
        """Start the sums of groups that did not get all their gradients, and let the device wait for all sums."""
        if not self.active:
            return
        self._start(len(self._groups))
        for work in self._works:
            work.wait()
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(group) for group in self._groups]
        self._started = 0
        self._works.clear()

    def _count(self, index: int, _: Tensor) -> None:
        """Hook of a parameter of group `index`: its gradient is complete."""
        if self.active:
            self._missing[index] -= 1
            complete = next((i for i, missing in enumerate(self._missing) if missing), len(self._groups))
            self._start(complete)

    def _start(self, end: int) -> None:
        """Start the sums of all groups before `end` that have not started."""
        for group in self._groups[self._started : end]:
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            if gradients:
                with dist._coalescing_manager(async_ops=True) as work:  # one collective
                    for gradient in gradients:
                        dist.all_reduce(gradient)
                self._works.append(work)
        self._started = max(self._started, end)


def sum_in_backward(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Let the backward passes of `model` sum its gradients over ranks (see `sums_of`)."""
    in_blocks = [list(block.parameters()) for block in blocks]
    seen = {parameter for group in in_blocks for parameter in group}
    first, *rest = [[parameter] for parameter in model.parameters() if parameter not in seen]
    model.gradient_sums = GradientSums([first, *in_blocks, *rest])  # type: ignore[assignment]  # embedding first


def sums_of(model: nn.Module) -> GradientSums | None:
    """The `GradientSums` of a model, or None if its backward passes do not sum over ranks."""
    return getattr(model, "gradient_sums", None)
