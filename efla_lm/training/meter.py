"""Speed and memory of training: tokens per second, model FLOPs utilisation, peak memory."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator

import torch

# Dense bf16 peak of one device in FLOP/s, from the vendors' data sheets (without sparsity), by part of the device's
# name.
PEAK_FLOPS = {
    "H200": 989e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12,
    "A100": 312e12, "A40": 149.7e12, "A6000": 154.8e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165.2e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 peak of `device` in FLOP/s, or None where it is not known (a CPU among them)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far, in GiB: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class Meter:
    """Clock of the training loop that leaves out validation and saving.

    flops_per_token: FLOPs of forward and backward per position; utilisation is None where the peak is not known. The
    host must have waited for the device (`Verdicts.settle`) before `read`.
    """

    def __init__(self, flops_per_token: float, device: torch.device, world_size: int) -> None:
        self._flops, self._device, self._world_size = flops_per_token, device, world_size
        self._begin = time.perf_counter()
        self._idle = 0.0
        self.rate = 0.0  # tokens per second as last read
        self._mark, self._tokens = self._begin, 0

    def count(self, tokens: int) -> None:
        """Add the tokens of an update."""
        self._tokens += tokens

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        begin = time.perf_counter()
        yield
        idle = time.perf_counter() - begin
        self._idle += idle
        self._mark += idle

    def read(self) -> dict[str, float | None]:
        """Speed since the last `read`; `seconds` of training since the start of this launch; peak memory."""
        now = time.perf_counter()
        self.rate = self._tokens / max(now - self._mark, 1e-9)
        self._mark, self._tokens = now, 0
        peak = peak_flops(self._device)
        return {
            "tokens_per_second": self.rate,
            "mfu": self.rate * self._flops / (peak * self._world_size) if peak else None,
            "seconds": now - self._begin - self._idle,
            "peak_memory_gib": peak_memory_gib(self._device),
        }
