"""Time and memory of a function of tensors on a GPU, as medians with quartiles."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds: the median, and the quartiles around it. `by_graph` False: events around eager calls."""

    median: float
    lower: float
    upper: float
    by_graph: bool = True

    @staticmethod
    def of(samples: list[float], by_graph: bool = True) -> Timing:
        """Of measurements in microseconds; a single one is its own quartiles."""
        lower, _, upper = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
        return Timing(round(statistics.median(samples), 2), round(lower, 2), round(upper, 2), by_graph)

    def per_call(self, calls: int) -> Timing:
        """Of one call, where `calls` of them were measured together."""
        median, lower, upper = (round(time / calls, 2) for time in (self.median, self.lower, self.upper))
        return Timing(median, lower, upper, self.by_graph)


def device_time(function: Callable[[], Any], repeats: int) -> Timing:
    """Time on the device alone: replays of a CUDA graph of one call, so that the device never waits for a launch.

    A replay itself costs a few microseconds, which matters for calls as short as a decoding step: see `layer_figures`.
    Calls that cannot be captured are timed by events around eager calls; then launches count where they are the limit.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph, kept, captured = torch.cuda.CUDAGraph(), None, True
    try:
        with torch.cuda.graph(graph):
            kept = function()
    except RuntimeError:  # some library call of it is not allowed in a capture
        torch.cuda.synchronize()
        captured = False
    run = graph.replay if captured else function
    for _ in range(3):
        run()
    samples = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    del kept
    return Timing.of(samples, captured)


def wall_time(function: Callable[[], Any], repeats: int, calls: int = 10) -> Timing:
    """Time per call of a program that calls back to back: the slower of launching and running."""
    for _ in range(3):
        function()
    samples = []
    for _ in range(max(3, repeats // 2)):  # other programs disturb the host now and then: the median needs many
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        torch.cuda.synchronize()
        samples.append(1e6 * (time.perf_counter() - start) / calls)
    return Timing.of(samples, by_graph=False)


def peak_memory_mib(function: Callable[[], Any]) -> float:
    """Most memory that one call holds beyond what was held before it, its results included."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def figures(function: Callable[[], Any], repeats: int) -> dict[str, Any]:
    """A result row's columns: device and wall time, and the memory that a call adds at its peak."""
    return layer_figures([function], repeats)


def layer_figures(calls: list[Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """The columns of `figures` for one of `calls`, which run one after the other as the layers of a model do.

    The time of all calls, in one CUDA graph on the device, is divided by their number: they share the cost of a replay,
    and each call finds the cache as the others leave it.
    """

    def everything() -> list[Any]:
        return [call() for call in calls]

    count = len(calls)
    peak = peak_memory_mib(calls[0])
    wall = wall_time(everything, repeats // count, max(1, 10 // count)).per_call(count)
    device = device_time(everything, repeats).per_call(count)
    return {
        "device_us": device.median, "device_us_quartiles": [device.lower, device.upper],
        "device_by_graph": device.by_graph, "wall_us": wall.median, "wall_us_quartiles": [wall.lower, wall.upper],
        "peak_mib": peak,
    }  # fmt: skip
