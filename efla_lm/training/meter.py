"""Speed and memory of training: tokens per second, model FLOPs utilisation, peak memory."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator

import torch

from efla_lm.parallel import gpus

STARTUP_STEPS = 2  # of a launch: the first compiles, the second records CUDA graphs


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of `device` in FLOP/s, or None if it is not known (as of a CPU)."""
    return gpus.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far, in GiB: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Meter:
    """The clock of the training loop. Validation, saving and the first STARTUP_STEPS of a launch do not count.

    flops_per_token: FLOPs of the forward and backward pass per position.
    """

    def __init__(self, flops_per_token: float, device: torch.device, world_size: int) -> None:
        self._flops, self._device, self._world_size = flops_per_token, device, world_size
        self._begin = time.perf_counter()
        self._idle = 0.0
        self.rate: float | None = None  # tokens per second as last read
        self._steps, self._mark, self._tokens = 0, self._begin, 0

    def count(self, tokens: int, wait: Callable[[], object]) -> None:
        """Count a step of `tokens`. wait: waits for the device; called after the steps of the start-up only."""
        self._steps += 1
        if self._steps <= STARTUP_STEPS:
            wait()
            self._mark = time.perf_counter()
        else:
            self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The time that is spent inside does not count."""
        begin = time.perf_counter()
        yield
        idle = time.perf_counter() - begin
        self._idle += idle
        self._mark += idle

    def read(self) -> dict[str, float | None]:
        """Figures for metrics.jsonl. The host must have waited for the device (`StepResults.settle`).

        tokens_per_second and mfu since the last `read`: None if no step counted since, mfu also on a device whose peak
        is not known. seconds of training since the start of this launch. peak_memory_gib.
        """
        now = time.perf_counter()
        if self._tokens:
            self.rate = self._tokens / max(now - self._mark, 1e-9)
        peak, rate = peak_flops(self._device), self.rate if self._tokens else None
        self._mark, self._tokens = now, 0
        return {
            "tokens_per_second": rate,
            "mfu": rate * self._flops / (peak * self._world_size) if peak and rate else None,
            "seconds": now - self._begin - self._idle,
            "peak_memory_gib": peak_memory_gib(self._device),
        }
