"""Where the time of an update goes: a trace by torch.profiler, and a table of its kernels by kind (`profile=N`).

On a GPU the times are those of kernels on the device; `idle` is when none runs: launches that the host did not make in
time, and waits; `exposed` is when communication runs and nothing else. On a CPU they are those of PyTorch's operators,
each without those that it calls.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from efla_lm.parallel.distributed import World

WARMUP = 10  # updates of a launch before the traced ones: compiling, recording of graphs, first allocations

# The first kind whose pattern is found in a kernel's name has it.
KINDS = {
    "communication": r"nccl|all_gather|all_reduce|reduce_scatter|c10d",
    "loss": r"cross_entropy|nll_loss|log_softmax|logsumexp",
    "convolution": r"convolution|conv1d|conv_depthwise",
    "mixer": r"solve_kernel|scan_kernel|scan_backward|(?<!_)gradient_([qk]_|gated_|)kernel|transition_kernel|"
    r"merge_kernel|ssd_|chunk_(?!cat)|flash|fmha|attention|efla_kernels::",
    "optimiser": r"adam|multi_tensor_apply|lpnorm|_foreach",
    "products": r"gemm|nvjet|cutlass|xmma|splitkreduce|::mm$|addmm|bmm|matmul|aten::linear",
    # before copies: the fused kernels of norms have the casts of their inputs in their names
    "norms and other reductions": r"triton_red|triton_per|norm|reduce_kernel|::sum",
    "copies": r"memcpy|memset|copy_|::to$|_to_copy|::clone|chunk_cat",  # the last: FSDP, before it sums gradients
    "embedding": r"embedding|index_select|indexing",
    "pointwise": r"swiglu|triton_poi|elementwise|triton_|aten::",
}


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds per update by kind; `span` is the update as the clock has it, `busy` when some kernel runs.

    A kernel of communication runs from its own launch until all ranks have taken part: waiting for them is in it.
    """

    span: float
    busy: float
    exposed: float  # of busy: when kernels of communication run alone
    kinds: dict[str, float]
    kernels: float  # per update
    top: list[tuple[str, float, float]]  # name, milliseconds and calls per update of the costliest kernels

    @property
    def idle(self) -> float:
        """When nothing runs."""
        return max(self.span - self.busy, 0.0)

    def row(self) -> dict[str, float]:
        """For a result file."""
        times = {"span": self.span, "busy": self.busy, "idle": self.idle, "exposed communication": self.exposed}
        return times | {"kernels": self.kernels} | self.kinds

    def text(self) -> str:
        """For people: kinds by cost, then the costliest kernels."""
        lines = [
            f"{self.span:.2f} ms per update, {self.busy:.2f} busy, {self.idle:.2f} idle, {self.kernels:.0f} kernels, "
            f"{self.exposed:.2f} ms communication alone"
        ]
        for kind, ms in sorted(self.kinds.items(), key=lambda item: -item[1]):
            lines.append(f"{ms:10.2f} ms {100 * ms / max(self.span, 1e-9):5.1f} %  {kind}")
        lines += ["", *(f"{ms:10.2f} ms {calls:7.1f} x  {name[:100]}" for name, ms, calls in self.top)]
        return "\n".join(lines) + "\n"


def kind_of(name: str) -> str:
    """The kind of a kernel or operator."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def union_ms(intervals: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the intervals [start, end] in microseconds lasts, in milliseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


class Tracer:
    """Traces what runs between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device], acc_events=True)

    def start(self) -> None:
        """Begin, once the device has done what it was given."""
        self._wait()
        self._profile.start()

    def stop(self, updates: int, trace: Path | None = None) -> Breakdown:
        """The breakdown of `updates` updates; `trace`: where to write what chrome://tracing and Perfetto show."""
        self._wait()
        self._profile.stop()
        if trace is not None:
            trace.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(trace))
        on_device = self._device.type == "cuda"
        kinds: dict[str, float] = defaultdict(float)
        names: dict[str, list[float]] = defaultdict(list)
        intervals, others, everything = [], [], []
        for event in self._profile.events() or []:
            span = event.time_range
            everything.append((span.start, span.end))
            if on_device:
                # the optimiser's step is also marked as a whole, over its kernels
                if event.device_type != DeviceType.CUDA or event.is_user_annotation:
                    continue
                time = span.end - span.start
            else:
                time = event.self_cpu_time_total
            intervals.append((span.start, span.end))
            kind = kind_of(event.name)
            kinds[kind] += time / 1e3 / updates
            if kind != "communication":
                others.append((span.start, span.end))
            names[event.name].append(time / 1e3 / updates)
        costly = sorted(names.items(), key=lambda item: -sum(item[1]))[:20]
        begin, end = min((s for s, _ in everything), default=0.0), max((e for _, e in everything), default=0.0)
        busy = union_ms(intervals) / updates
        return Breakdown(
            span=(end - begin) / 1e3 / updates,
            busy=busy,
            exposed=busy - union_ms(others) / updates,
            kinds=dict(kinds),
            kernels=len(intervals) / updates,
            top=[(name, sum(times), len(times) / updates) for name, times in costly],
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class RunProfile:
    """`profile=N` of a run: N updates after the first ten of a launch, traced on rank 0 into RUN/profile."""

    def __init__(self, updates: int | None, run_dir: Path, world: World) -> None:
        self._updates = updates if world.is_main else None
        self._folder, self._device = run_dir / "profile", world.device
        self._seen = 0
        self._tracer: Tracer | None = None

    def after_update(self) -> str | None:
        """To be called after each update; returns the table when it is made."""
        if self._updates is None:
            return None
        self._seen += 1
        if self._seen == WARMUP:
            self._tracer = Tracer(self._device)
            self._tracer.start()
        if self._seen != WARMUP + self._updates or self._tracer is None:
            return None
        found = self._tracer.stop(self._updates, self._folder / "trace.json")
        self._tracer = None
        (self._folder / "table.json").write_text(json.dumps(found.row() | {"top": found.top}, indent=1) + "\n")
        (self._folder / "table.txt").write_text(found.text())
        return f"{self._folder}: {found.text()}"

    def close(self) -> str | None:
        """What to say at the end where the run had too few updates."""
        if self._updates is None or self._seen >= WARMUP + self._updates:
            return None
        if self._tracer is not None:
            self._tracer.stop(1)
        return f"profile={self._updates}: nothing written, it traces updates {WARMUP + 1} to {WARMUP + self._updates}"
