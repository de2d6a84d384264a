"""Commands in processes of their own: side by side, on one or several GPUs, with a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parents[2]


def python(processes: int = 1) -> list[str]:
    """The start of a Python command; torchrun's for several processes on this machine, a GPU each."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [sys.executable, *(several if processes > 1 else [])]


@dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code (None: the time was over) and what it printed."""

    code: int | None
    output: str

    @property
    def reason(self) -> str:
        """Why it failed: the last error that it printed, else the exit code."""
        return last_error(self.output) or f"exit code {self.code}"


class Launcher:
    """Runs commands, `at_once` of them side by side. Leaving the `with` block ends all that are still running."""

    def __init__(self, at_once: int = 1) -> None:
        self._pool = ThreadPoolExecutor(at_once)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped, self._lock = False, Lock()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._stopped = True
            for process in self._running:
                end(process)
        self._pool.shutdown(wait=True)

    def map(
        self, work: Callable[[Item], Result], items: Sequence[Item], in_order: bool = False
    ) -> Iterator[tuple[Item, Result]]:
        """(item, work(item)) as each is done, or in the order given; `work` calls `run` in a thread of the pool."""
        futures = {self._pool.submit(work, item): item for item in items}
        for future in futures if in_order else as_completed(futures):
            yield futures[future], future.result()

    def run(
        self, command: Sequence[str], limit_s: float | None, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> Outcome:
        """Run a command in a session of its own, for at most `limit_s` seconds (None: no limit).

        All processes that it started end with it.
        """
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if self._stopped:
                    return Outcome(None, "")
                process = subprocess.Popen(
                    command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._running.add(process)
            code: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
            with self._lock:
                end(process)
                self._running.discard(process)
            output.seek(0)
            return Outcome(code, output.read().decode(errors="replace"))


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a command: the process and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_until_stopped(command: Sequence[str]) -> tuple[int, bool]:
    """(exit code, whether we were asked to stop) of a command that prints to this terminal.

    SIGTERM is passed on to it. Ctrl-C reaches it from the terminal. In both cases its end is waited for: it saves.
    """
    asked: list[int] = []
    child = subprocess.Popen(command, cwd=ROOT)

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        if number == signal.SIGTERM:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code, bool(asked)


def timed_command(command: Sequence[str]) -> tuple[int, float]:
    """(exit code, seconds) of a command that prints to this terminal."""
    start = time.perf_counter()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return code, time.perf_counter() - start


def last_error(output: str) -> str:
    """The line of a failed process's output that says why: the last error of a traceback, cut to 300 characters."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line.strip()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*([Ee]rror|Exception)\b", line)]
    errors = [line for line in errors if not line.startswith("torch.distributed.elastic")]  # torchrun: some rank failed
    return (errors or lines or [""])[-1][:300]
