"""Forward and backward pass of a micro-batch as a CUDA graph: one launch instead of some thousand.

A small batch keeps a GPU busy for less time than the host needs to launch its kernels. A graph, recorded once, replays
them on the same memory: inputs, loss and gradients lie where they lay when it was recorded. Two graphs are kept, that
of an update's first micro-batch, which writes the gradients, and that of the further ones, which add to them. What
changes from update to update (learning rate, clipping, whether the step is taken) stays outside, in the optimiser.
Where ranks sum their gradients in the backward pass (`efla_lm.parallel.overlap`), a graph of an update's last
micro-batch holds these collectives too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from efla_lm.errors import UserError
from efla_lm.parallel.overlap import sums_of

Inputs = Mapping[str, Tensor | None]


def run_eagerly(model: nn.Module, inputs: Inputs, valid: Tensor, first: bool) -> Tensor:
    """Add the gradients of a micro-batch to the parameters'; returns its summed loss, fp32 or fp64.

    valid: the count of targets in the global batch, by which loss and gradients are divided. first: whether this is
    the first micro-batch of its update (the gradients are None then).
    """
    loss = model(**inputs).loss
    (loss / valid.to(loss.dtype)).backward()
    if (sums := sums_of(model)) is not None:
        sums.finish()
    return loss.detach()


class GraphedPasses:
    """`run_eagerly` from graphs, for micro-batches of one shape and parameters that stay where they are.

    The first update runs eagerly, so that everything is compiled and loaded; each graph is recorded where it is first
    needed after that. Raises ValueError for another shape, UserError where something in the pass cannot be recorded.
    """

    def __init__(self) -> None:
        self._updates = 0
        self._inputs: dict[str, Tensor | None] = {}
        self._valid: Tensor | None = None
        # by whether it is an update's first micro-batch, and whether gradients are summed over ranks in it
        self._losses: dict[tuple[bool, bool], Tensor] = {}
        self._replays: dict[tuple[bool, bool], Callable[[], None]] = {}
        self._gradients: list[Tensor | None] = []
        self._pool: Any = None

    def __call__(self, model: nn.Module, inputs: Inputs, valid: Tensor, first: bool) -> Tensor:
        self._updates += first
        if self._updates <= 1:
            return run_eagerly(model, inputs, valid, first)
        self._take(inputs, valid)
        if first and self._gradients:  # the optimiser lets go of them after each step
            for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
                parameter.grad = gradient
        sums = sums_of(model)
        kind = first, sums is not None and sums.wanted
        if kind not in self._replays:
            self._record(model, kind)
        self._replays[kind]()
        return self._losses[kind]

    def close(self) -> None:
        """Let go of the graphs. NCCL does not end a communicator while a graph holds collectives of it."""
        self._replays.clear()

    def _take(self, inputs: Inputs, valid: Tensor) -> None:
        """Put the inputs where the graphs read them."""
        if self._valid is None:
            self._inputs = {name: None if x is None else x.clone() for name, x in inputs.items()}
            self._valid = valid.clone()
            return
        for name, place in self._inputs.items():
            given = inputs[name]
            shapes = [None if x is None else tuple(x.shape) for x in (place, given)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{name}: the graph was recorded for {shapes[0]}, got {shapes[1]}")
            if place is not None and given is not None:
                place.copy_(given)
        self._valid.copy_(valid)

    def _record(self, model: nn.Module, kind: tuple[bool, bool]) -> None:
        assert self._valid is not None
        valid, first = self._valid, kind[0]

        def work() -> None:
            self._losses[kind] = run_eagerly(model, self._inputs, valid, first)

        self._replays[kind] = self._graph_of(work)
        if first:
            self._gradients = [parameter.grad for parameter in model.parameters()]

    def _graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        """A graph of what `work` launches, which does not run now; what it allocates stays its own."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # thread_local: the threads of the process groups may go on asking the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"train.cuda_graphs: the pass cannot be recorded ({reason}); set it to off") from error
        return graph.replay


def release(passes: Callable[..., Tensor]) -> None:
    """To be called before the process group ends, however the training did: see `GraphedPasses.close`."""
    if isinstance(passes, GraphedPasses):
        passes.close()
