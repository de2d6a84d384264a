"""A training step as a CUDA graph: hundreds of small kernels for one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch


class GraphedStep:
    """`work()` again and again, from a graph where there is a GPU.

    `work` reads and writes tensors that stay where they are (its inputs are copied into them before a call) and leaves
    nothing behind in Python: after the first calls, which run as they are written so that kernels are compiled and
    loaded, what it launches is recorded once and replayed. Elsewhere than on a GPU every call runs as it is written.
    """

    EAGER = 2

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.work = work
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        # a stream of its own: autograd would otherwise order a recorded backward pass after work on the usual one
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> None:
        if self.stream is None:
            self.work()
            return
        usual = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(usual)
        self.calls += 1
        with torch.cuda.stream(self.stream):
            if self.calls <= self.EAGER:
                self.work()
            else:
                if self.graph is None:
                    self.graph = self._record()
                self.graph.replay()
        usual.wait_stream(self.stream)

    def _record(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.stream.device if self.stream else None)
        # thread_local: autograd launches the backward pass from a thread of its own
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.work()
        return graph
