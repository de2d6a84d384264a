"""Where the time of a step goes: a trace by torch.profiler, and a table of its kernels by kind (`profile=N`).

On a GPU the times are those of kernels on the device. `idle` is the time without a kernel: the host launched too late,
or something waited. `exposed` is the time when communication runs and nothing else. On a CPU the times are those of
PyTorch's operators, each without the operators that it calls.
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

WARMUP = 10  # steps of a launch before the traced ones: they compile, record graphs and allocate memory

# A kernel is of the first kind whose pattern is in its name.
KINDS = {
    "communication": r"nccl|all_gather|all_reduce|reduce_scatter|c10d",
    "loss": r"cross_entropy|nll_loss|log_softmax|logsumexp",
    "convolution": r"convolution|conv1d|conv_depthwise",
    "mixer": r"solve_kernel|scan_kernel|scan_backward|(?<!_)gradient_([qk]_|gated_|)kernel|transition_kernel|"
    r"merge_kernel|ssd_|chunk_(?!cat)|flash|fmha|attention|efla_kernels::",
    "optimiser": r"adam|multi_tensor_apply|lpnorm|_foreach",
    "products": r"gemm|nvjet|cutlass|xmma|splitkreduce|::mm$|addmm|bmm|matmul|aten::linear",
    # before copies: the names of fused norm kernels contain the casts of their inputs
    "norms and other reductions": r"triton_red|triton_per|norm|reduce_kernel|::sum",
    "copies": r"memcpy|memset|copy_|::to$|_to_copy|::clone|chunk_cat",  # chunk_cat: FSDP, before it sums gradients
    "embedding": r"embedding|index_select|indexing",
    "pointwise": r"swiglu|triton_poi|elementwise|triton_|aten::",
}


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds per step by kind. `span`: the step by the clock. `busy`: the time when some kernel runs.

    A kernel of communication runs from its own launch until all ranks have taken part, so it includes waiting for them.
    """

    span: float
    busy: float
    exposed: float  # the part of `busy` when only kernels of communication run
    kinds: dict[str, float]
    kernels: float  # per step
    top: list[tuple[str, float, float]]  # name, milliseconds and calls per step of the costliest kernels

    @property
    def idle(self) -> float:
        """The time when nothing runs."""
        return max(self.span - self.busy, 0.0)

    def row(self) -> dict[str, float]:
        """The columns of a result file."""
        times = {"span": self.span, "busy": self.busy, "idle": self.idle, "exposed communication": self.exposed}
        return times | {"kernels": self.kernels} | self.kinds

    def text(self) -> str:
        """A table for people: kinds by cost, then the costliest kernels."""
        lines = [
            f"{self.span:.2f} ms per step, {self.busy:.2f} busy, {self.idle:.2f} idle, {self.kernels:.0f} kernels, "
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
    """Length of the union of intervals [start, end] in microseconds, in milliseconds."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e3


class Tracer:
    """Traces everything that runs between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device], acc_events=True)

    def start(self) -> None:
        """Wait for the device, then begin."""
        self._wait()
        self._profile.start()

    def stop(self, steps: int, trace: Path | None = None) -> Breakdown:
        """The breakdown of the last `steps` steps. trace: a file to write for chrome://tracing and Perfetto."""
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
                # torch marks the optimiser's step as a whole too, over its kernels
                if event.device_type != DeviceType.CUDA or event.is_user_annotation:
                    continue
                time = span.end - span.start
            else:
                time = event.self_cpu_time_total
            intervals.append((span.start, span.end))
            kind = kind_of(event.name)
            kinds[kind] += time / 1e3 / steps
            if kind != "communication":
                others.append((span.start, span.end))
            names[event.name].append(time / 1e3 / steps)
        costly = sorted(names.items(), key=lambda item: -sum(item[1]))[:20]
        begin, end = min((s for s, _ in everything), default=0.0), max((e for _, e in everything), default=0.0)
        busy = union_ms(intervals) / steps
        return Breakdown(
            span=(end - begin) / 1e3 / steps,
            busy=busy,
            exposed=busy - union_ms(others) / steps,
            kinds=dict(kinds),
            kernels=len(intervals) / steps,
            top=[(name, sum(times), len(times) / steps) for name, times in costly],
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class RunProfile:
    """`profile=N`: rank 0 traces N steps after the first ten of a launch into RUN/profile."""

    def __init__(self, steps: int | None, run_dir: Path, world: World) -> None:
        self._steps = steps if world.is_main else None
        self._folder, self._device = run_dir / "profile", world.device
        self._seen = 0
        self._tracer: Tracer | None = None

    def after_step(self) -> str | None:
        """Call this after each step. Returns the table when the trace is complete."""
        if self._steps is None:
            return None
        self._seen += 1
        if self._seen == WARMUP:
            self._tracer = Tracer(self._device)
            self._tracer.start()
        if self._seen != WARMUP + self._steps or self._tracer is None:
            return None
        breakdown = self._tracer.stop(self._steps, self._folder / "trace.json")
        self._tracer = None
        (self._folder / "table.json").write_text(json.dumps(breakdown.row() | {"top": breakdown.top}, indent=1) + "\n")
        (self._folder / "table.txt").write_text(breakdown.text())
        return f"{self._folder}: {breakdown.text()}"

    def close(self) -> str | None:
        """Stop a trace under way. Returns what to say at the end of a run with too few steps."""
        if self._steps is None or self._seen >= WARMUP + self._steps:
            return None
        if self._tracer is not None:
            self._tracer.stop(1)
        return f"profile={self._steps}: nothing written, it traces steps {WARMUP + 1} to {WARMUP + self._steps}"
