"""A second CUDA stream, for work that need not wait for what the current one is given next.

A product keeps the tensor cores busy and leaves the memory idle, a pass over the tokens the reverse: side by side they
take less time than one after the other.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # a product's blocks need a multiprocessor whole: they go first


class Fork:
    """From here on two streams, until `join`; on a CPU there is nothing to it.

    Tensors that `beside` reads or writes must be allocated outside of it and live until `join`: then the allocator,
    which knows the current stream alone, gives their memory to nobody else too early. Works in a CUDA graph's capture.
    """

    def __init__(self, x: Tensor) -> None:
        """Of the device of x; `beside` starts behind what the current stream was given so far."""
        self._current = torch.cuda.current_stream(x.device) if x.is_cuda else None
        if self._current is not None:
            self._second = _second_stream(x.device)
            self._second.wait_stream(self._current)

    def beside(self) -> contextlib.AbstractContextManager[object]:
        """What is done within runs beside what the current stream is given from the fork to the join."""
        return contextlib.nullcontext() if self._current is None else torch.cuda.stream(self._second)

    def join(self) -> None:
        """What comes next waits for both."""
        if self._current is not None:
            self._current.wait_stream(self._second)
