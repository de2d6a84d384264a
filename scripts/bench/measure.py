"""What the benchmarks of ops and of layers share: both passes of a function, compilation side by side, printed rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from efla_kernels.environment import describe_environment
from torch import Tensor

from scripts.study.result_file import ResultFile, command_line, portable

KEY = ("op", "layer", "impl", "hidden", "batch", "tokens", "heads", "direction")
Row = dict[str, Any]
Tensors = dict[str, Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Unserved(Exception):
    """An implementation that does not serve an op or layer here; the message says why."""


def differentiable(tensors: Tensors) -> Tensors:
    """The tensors as leaves of a graph; integers stay as they are."""
    return {n: x.detach().requires_grad_() if x.is_floating_point() else x for n, x in tensors.items()}


def both_passes(function: Callable[[Tensors], Any], tensors: Tensors, dy: Any) -> dict[str, Callable[[], Any]]:
    """{"fwd": the forward pass without gradients, "fwd_bwd": forward and backward with the gradients `dy`}."""
    leaves = differentiable(tensors)
    wanted = [x for x in leaves.values() if x.requires_grad]

    def forward() -> Any:
        with torch.no_grad():
            return function(tensors)

    return {"fwd": forward, "fwd_bwd": lambda: torch.autograd.grad(function(leaves), wanted, dy)}


def one_line(error: BaseException) -> str:
    """An error as a result row names it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def compile_side_by_side(
    warm: Callable[..., None], jobs: Sequence[tuple[Any, ...]], workers: int, limit_s: float | None = None
) -> list[tuple[Any, ...]]:
    """Call `warm(*job)` for all jobs in parallel processes; the measuring process finds their caches on disk.

    fla's tuning results are not kept: the processes disturb each other. Returns the jobs not done within `limit_s`.
    """
    os.environ["FLA_CACHE_RESULTS"] = "0"
    if not workers:
        return []
    pool = ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn"))
    running = {pool.submit(warm, *job): job for job in jobs}
    done, late = wait(running, timeout=limit_s)
    processes = list((pool._processes or {}).values())  # there is no public way to end a worker that still compiles
    pool.shutdown(wait=not late, cancel_futures=True)
    for process in processes if late else ():
        process.terminate()
    for future in done:
        future.result()
    return [running[future] for future in late]


def open_result(path: Path, study: str, settings: Any, parts_by: tuple[str, ...], **head: Any) -> ResultFile:
    """The result file of a benchmark whose parts are combinations of the settings named in `parts_by`."""
    about = {
        "environment": describe_environment(),
        "command": command_line(study, settings),
        "settings": portable(settings, without=("table", *parts_by)),
    }
    return ResultFile(path, about | head, KEY)


def is_accelerated() -> bool:
    """Whether there is a GPU to time on; if not, say so."""
    if not torch.cuda.is_available():
        print("no accelerator found: there is nothing to time here. `table=FILE` prints an earlier result.")
    return torch.cuda.is_available()


def print_row(name: str, row: Row) -> None:
    """One measured row, or why there is none."""
    if "skipped" in row:
        print(f"{name:<48} skipped: {row['skipped']}", flush=True)
        return
    wrong = "" if row.get("right", True) else "  BEYOND THE BOUND"
    print(
        f"{name:<48} device {row['device_us']:9.1f} us  wall {row['wall_us']:9.1f} us  "
        f"peak {row['peak_mib']:7.0f} MiB  rel_err {max(row['rel_errs'].values()):.1e}{wrong}",
        flush=True,
    )
