"""A training step as a CUDA graph: one launch in the place of hundreds of small kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from efla_lm.parallel.cuda_graphs import record


class GraphedStep:
    """Calls `work()`; on a GPU the third call records it as a CUDA graph, and later calls replay the graph.

    `work` reads and writes tensors at fixed addresses (the caller copies inputs into them before a call) and changes
    nothing else in Python. The first two calls run eagerly, so that kernels are compiled and loaded.
    """

    EAGER = 2

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.work = work
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        # on the default stream autograd would order a recorded backward pass after other work
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
        torch.cuda.synchronize(self.stream.device if self.stream else None)
        return record(self.work, stream=self.stream)
