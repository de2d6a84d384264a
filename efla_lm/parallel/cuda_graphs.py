"""The forward and backward pass of a micro-batch: kernel by kernel, or as a CUDA graph in one launch.

A small batch keeps a GPU busy for less time than the host needs to launch its kernels one by one. A CUDA graph is
recorded once and replayed on the same memory: inputs, loss and gradients keep their addresses. There is one graph for
the first micro-batch of a step, which writes the gradients, and one for the others, which add to them. What changes
from step to step (learning rate, clipping, whether the step is taken) is not recorded: the optimiser does it. Where
ranks sum their gradients in the backward pass (`efla_lm.parallel.overlap`), the graph of the last micro-batch contains
these collectives too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from efla_lm.errors import UserError
from efla_lm.parallel.overlap import sums_of

Inputs = Mapping[str, Tensor | None]
ForwardBackward = Callable[[nn.Module, Inputs, Tensor, bool], Tensor]  # as `eager_forward_backward`


def eager_forward_backward(model: nn.Module, inputs: Inputs, targets: Tensor, first: bool) -> Tensor:
    """Add the gradients of one micro-batch to those of the parameters. Returns its summed loss, fp32 or fp64.

    targets: number of targets in the global batch, a scalar by which loss and gradients are divided. first: whether
    this is the first micro-batch of its step; the gradients are None then.
    """
    loss = model(**inputs).loss
    (loss / targets.to(loss.dtype)).backward()
    if (sums := sums_of(model)) is not None:
        sums.finish()
    return loss.detach()


def record(work: Callable[[], None], pool: Any = None, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """A graph of what `work` launches, without running it. What `work` allocates belongs to the graph."""
    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads (of autograd and of the process groups) may call CUDA meanwhile
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph


class GraphedForwardBackward:
    """`eager_forward_backward` from graphs, for micro-batches of one shape and parameters that keep their addresses.

    The first step runs eagerly, so that all kernels are compiled and loaded. Each graph is recorded when it is first
    needed after that. Raises ValueError for another shape, UserError for an operation that cannot be recorded.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._inputs: dict[str, Tensor | None] = {}
        self._targets: Tensor | None = None
        # key: whether it is the first micro-batch of a step, whether ranks sum their gradients in it
        self._losses: dict[tuple[bool, bool], Tensor] = {}
        self._replays: dict[tuple[bool, bool], Callable[[], None]] = {}
        self._gradients: list[Tensor | None] = []
        self._pool: Any = None

    def __call__(self, model: nn.Module, inputs: Inputs, targets: Tensor, first: bool) -> Tensor:
        self._steps += first
        if self._steps <= 1:
            return eager_forward_backward(model, inputs, targets, first)
        self._copy_inputs(inputs, targets)
        if first and self._gradients:  # the optimiser sets the gradients to None after each step
            for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
                parameter.grad = gradient
        sums = sums_of(model)
        kind = first, sums is not None and sums.active
        if kind not in self._replays:
            self._record(model, kind)
        self._replays[kind]()
        return self._losses[kind]

    def close(self) -> None:
        """Free the graphs: NCCL does not end a communicator while a graph contains its collectives."""
        self._replays.clear()

    def _copy_inputs(self, inputs: Inputs, targets: Tensor) -> None:
        """Copy the inputs to where the graphs read them."""
        if self._targets is None:
            self._inputs = {name: None if x is None else x.clone() for name, x in inputs.items()}
            self._targets = targets.clone()
            return
        for name, recorded in self._inputs.items():
            given = inputs[name]
            shapes = [None if x is None else tuple(x.shape) for x in (recorded, given)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{name}: the graph was recorded for {shapes[0]}, got {shapes[1]}")
            if recorded is not None and given is not None:
                recorded.copy_(given)
        self._targets.copy_(targets)

    def _record(self, model: nn.Module, kind: tuple[bool, bool]) -> None:
        assert self._targets is not None
        targets, first = self._targets, kind[0]

        def work() -> None:
            self._losses[kind] = eager_forward_backward(model, self._inputs, targets, first)

        self._replays[kind] = self._graph_of(work)
        if first:
            self._gradients = [parameter.grad for parameter in model.parameters()]

    def _graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            return record(work, self._pool).replay
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"train.cuda_graphs: the pass cannot be recorded ({reason}); set it to off") from error


def release(forward_backward: ForwardBackward) -> None:
    """Call this before the process group ends: see `GraphedForwardBackward.close`."""
    if isinstance(forward_backward, GraphedForwardBackward):
        forward_backward.close()
