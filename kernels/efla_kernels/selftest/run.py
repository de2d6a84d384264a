"""Every kernel against float64 on this machine: `python -m efla_kernels.selftest [--json FILE] [--only TEXT]`.

Run it first on a new GPU. Each row compares outputs, final states and every gradient with the float64 definition on
the same rounded inputs. New memory is filled with NaN first. Rows run in worker processes, which compile in parallel. A
crash fails its row, and a fresh worker continues. The exit code is 0 only if every row passes.

Without a GPU a few rows run in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from efla_kernels import backends
from efla_kernels.environment import describe_environment
from efla_kernels.selftest import accuracy
from efla_kernels.selftest.rows import Row, accelerator_rows, interpreter_rows
from efla_kernels.selftest.rows_layers import layer_interpreter_rows, layer_rows
from efla_kernels.selftest.rows_ssd import ssd_interpreter_rows, ssd_rows

ROW_SECONDS = 240  # time limit of one row, with compilation
WORKERS = 14


def all_rows(full: bool) -> list[Row]:
    """The rows of this machine; parent and workers have the same list."""
    if torch.cuda.is_available():
        return [*accelerator_rows(full), *ssd_rows(), *layer_rows()]
    return [*interpreter_rows(), *ssd_interpreter_rows(), *layer_interpreter_rows()]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN, so that elements a kernel does not write are noticed."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def run_row(row: Row, device: str) -> dict[str, Any]:
    """The worst error of each output over the row's seeds, and the outputs beyond their bounds."""
    worst: dict[str, float] = {}
    absolute: set[str] = set()
    for seed in row.seeds:
        tensors = row.case.inputs(seed, device)
        with poisoned_memory():
            got = row.case.run(tensors, row.backend)
        truth = row.case.truth(tensors)
        absolute.update(accuracy.underflowed(truth))
        for name, error in accuracy.relative_errors(got, truth).items():
            worst[name] = max(error, worst.get(name, 0.0))
    failed = [name for name, error in worst.items() if not error <= row.bound(name)]
    return {"errors": worst, "absolute": sorted(absolute), "failed": failed, "message": ""}


def work(device: str, full: bool) -> int:
    """The loop of a worker: row numbers on stdin, one JSON line per row on stdout."""
    rows = all_rows(full)
    for line in sys.stdin:
        start = time.perf_counter()
        try:
            result = run_row(rows[int(line)], device)
        except Exception as error:  # any failure is this row's result
            result = {"errors": {}, "failed": ["error"], "message": f"{type(error).__name__}: {error}"[:500]}
        result["seconds"] = round(time.perf_counter() - start, 2)
        print(json.dumps(result), flush=True)
        if result["message"]:
            return 1  # a failed kernel can make the device context unusable
    return 0


class Worker:
    """A worker process, replaced by a fresh one when a row fails without a result."""

    def __init__(self, full: bool) -> None:
        self.command = [sys.executable, "-m", "efla_kernels.selftest", "--worker", *(["--full"] if full else [])]
        self.start()

    def start(self) -> None:
        """Start the process."""
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115, open as long as the process
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.stderr, text=True
        )

    def run(self, number: int) -> dict[str, Any]:
        """The row's result; a crash and a row that takes too long are results too."""
        assert self.process.stdin is not None and self.process.stdout is not None
        late = threading.Timer(ROW_SECONDS, self.process.kill)
        start = time.perf_counter()
        late.start()
        line = ""
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{number}\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        late.cancel()
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            result = self.crashed(time.perf_counter() - start)
        if result["message"]:
            self.close()
            self.start()
        return result

    def crashed(self, seconds: float) -> dict[str, Any]:
        """The result of a row that gave none."""
        try:
            code = self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:  # alive, but its line was no result
            self.process.kill()
            code = self.process.wait()
        self.stderr.seek(0)
        said = ([line.rstrip() for line in self.stderr if line.strip()] or ["no message"])[-1]
        end = f"no result in {ROW_SECONDS} s" if seconds >= ROW_SECONDS else f"worker ended with code {code}: {said}"
        return {"errors": {}, "failed": ["crash"], "message": end[:500], "seconds": round(seconds, 2)}

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        self.stderr.close()


def run_rows(rows: list[Row], numbers: list[int], workers: int, full: bool) -> dict[int, dict[str, Any]]:
    """Results by row number; each group of rows goes to one worker, groups that compile slowly first."""
    groups: dict[str, list[int]] = {}
    for number in numbers:
        groups.setdefault(rows[number].group, []).append(number)
    count = min(workers, len(groups))
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for _ in range(count):
        idle.put(Worker(full))
    results: dict[int, dict[str, Any]] = {}

    def run_group(group: list[int]) -> None:
        worker = idle.get()
        for number in group:
            results[number] = worker.run(number)
        idle.put(worker)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run_group, sorted(groups.values(), key=lambda g: -rows[g[0]].compile_cost)))
    for _ in range(count):
        idle.get().close()
    return results


def format_row(row: Row, result: dict[str, Any]) -> str:
    """One line of the table: pass or fail, the errors of values and gradients beside their bounds."""
    verdict = "FAIL" if result["failed"] else "pass"
    if result["message"]:
        return f"{verdict}  {row.name:<44} {result['message']}"
    errors: dict[str, float] = result["errors"]
    parts = []
    for kind in ("values", "gradients"):
        of_kind = {n: e for n, e in errors.items() if n.startswith("d") == (kind == "gradients")}
        if of_kind:
            name = max(of_kind, key=lambda n: of_kind[n] / row.bound(n))
            mark = "*" if name in result["absolute"] else ""
            parts.append(f"{name:>14}{mark:<1} {of_kind[name]:8.1e} <= {row.bound(name):7.1e}")
    outside = f"  failed: {', '.join(result['failed'])}" if result["failed"] else ""
    return f"{verdict}  {row.name:<44} {'  '.join(parts)}{outside}"


def report(rows: list[Row], results: dict[int, dict[str, Any]]) -> int:
    """Print the table and the counts; returns the number of rows that failed."""
    print("worst output or state, and worst gradient, beside their bounds (* absolute: the reference underflows)")
    for number, result in sorted(results.items()):
        print(format_row(rows[number], result))
    failed = sum(bool(result["failed"]) for result in results.values())
    print(f"{len(results) - failed} of {len(results)} rows pass" + (f", {failed} FAIL" if failed else ""))
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen rows and print their table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m efla_kernels.selftest", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path, help="write the results and the environment to this file")
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    parser.add_argument("--workers", type=int, default=min(WORKERS, os.cpu_count() or 1), help="processes at once")
    parser.add_argument("--full", action="store_true", help="also rows that take minutes to compile (fp32 at 256x256)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available()
    if options.worker:
        return work("cuda" if gpu else "cpu", options.full)
    if "triton" not in backends.available_backends():
        print("Triton is not installed: the ops run in PyTorch here, and `make test` covers those")
        return 0
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # for the workers; in this process Triton is already imported
        print("no accelerator found: a few rows in fp32 run in Triton's interpreter instead")
    rows, environment = all_rows(options.full), describe_environment()
    print(" | ".join(f"{name} {value}" for name, value in environment.items() if value is not None), flush=True)
    start = time.perf_counter()
    numbers = [i for i, row in enumerate(rows) if options.only in row.name]
    if not numbers:
        print(f"--only {options.only!r}: no row name contains this", file=sys.stderr)
        return 2
    results = run_rows(rows, numbers, options.workers, options.full)
    failed = report(rows, results)
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} s")
    if options.json:
        table = [
            {"name": rows[n].name, "bounds": {o: rows[n].bound(o) for o in r["errors"]}, **r}
            for n, r in sorted(results.items())
        ]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"environment": environment, "seconds": round(seconds, 1), "rows": table}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0
