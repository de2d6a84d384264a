"""Gradients of ranks that hold the model whole, summed while the backward pass is still at work.

    g <- sum_r g_r        over ranks r, in place, fp32, one collective per block

A block's gradients are complete long before the pass ends: the last block's after the loss, the embedding's at the very
end. The sum of each block starts at that moment, on the communication stream of the process group, and the pass goes on
beside it; only the embedding's is waited for. In a CUDA graph the collectives are recorded with the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn


class GradientSums:
    """Sums the gradients of `groups`, listed in the order of the forward pass, in the last backward pass of an update.

    wanted: whether the backward pass to come is that one; before it gradients add up where they are. Whoever runs the
    pass calls `finish` after it.
    """

    def __init__(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self.wanted = False
        # Collectives must start in one order on all ranks: that of the backward pass, whatever arrives first.
        self._groups = [list(group) for group in reversed(groups)]
        self._works: list[dist._CoalescingManager] = []
        self._clear()
        for index, group in enumerate(self._groups):
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))

    def finish(self) -> None:
        """Start the sums of groups that did not get all their gradients, and let the device wait for all of them."""
        if not self.wanted:
            return
        self._start(len(self._groups))
        for work in self._works:
            work.wait()
        self._clear()

    def _clear(self) -> None:
        self._missing = [len(group) for group in self._groups]
        self._started = 0
        self._works.clear()

    def _arrived(self, index: int, _: Tensor) -> None:
        """The gradient of a parameter of group `index` is complete."""
        if self.wanted:
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
    """From now on the gradients of `model` are summed over ranks in its backward passes (see `sums_of`)."""
    in_blocks = [list(block.parameters()) for block in blocks]
    seen = {parameter for group in in_blocks for parameter in group}
    first, *rest = [[parameter] for parameter in model.parameters() if parameter not in seen]
    model.gradient_sums = GradientSums([first, *in_blocks, *rest])  # type: ignore[assignment]  # embedding first


def sums_of(model: nn.Module) -> GradientSums | None:
    """What `sum_in_backward` left at the model; None: nobody sums in its backward pass."""
    return getattr(model, "gradient_sums", None)
