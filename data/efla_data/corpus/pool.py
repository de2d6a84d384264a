"""A pool of worker processes on concurrent.futures, each with its own state (a tokenizer, an open token file).

    with WorkerPool(processes, make_encoder, folder) as pool:
        future = pool.submit(encode, chunk)     # runs encode(worker, chunk), worker = make_encoder(folder, report)

One process means this process: nothing is started. Processes are spawned, so they share no memory and inherit no
locks. They do not import the caller's main module (torch and all), so a caller needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from efla_data.errors import DataError

Report = Callable[[int, int], None]  # adds to two totals of the whole pool, for progress
POLL = 0.1  # seconds between two looks at the totals

_state: dict[str, Any] = {}  # of a worker process


class WorkerPool:
    """`make(*arguments, report)` builds the state of a worker, once per process. A context manager.

    lock: a file that every worker process holds with a shared lock, so that a later run can wait for their end.
    When the block ends by an exception, the worker processes are killed. They also end when this process does.
    """

    def __init__(self, processes: int, make: Callable[..., Any], *arguments: Any, lock: Path | None = None) -> None:
        self.processes, self._make, self._arguments, self._lock = processes, make, arguments, lock
        self._totals: Any = [0, 0]
        self._worker: Any = None
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool:
        if self.processes > 1:
            context = multiprocessing.get_context("spawn")
            self._totals = context.Array("q", 2)
            start = (self._make, self._arguments, self._totals, self._lock)
            self._others = {process.pid for process in multiprocessing.active_children()}
            self._executor = ProcessPoolExecutor(self.processes, context, _start, start)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._executor is not None:
            if kind is not None:
                for process in multiprocessing.active_children():
                    if process.pid not in self._others:
                        process.kill()
            self._executor.shutdown(cancel_futures=True)

    @property
    def totals(self) -> tuple[int, int]:
        """What all workers have reported so far."""
        return self._totals[0], self._totals[1]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run `function(worker, *arguments)` in some process: later in a pool, at once in this process."""
        if self._executor is not None:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")  # what a process started here imports as its main
            try:
                return self._executor.submit(_call, function, arguments)
            except BrokenExecutor as error:
                raise _broken() from error
            finally:
                sys.modules["__main__"] = main
        if self._worker is None:
            self._worker = self._make(*self._arguments, self._report)
        future: Future[Any] = Future()
        try:
            future.set_result(function(self._worker, *arguments))
        except Exception as error:
            future.set_exception(error)
        return future

    def finished(self, futures: Iterable[Future[Any]]) -> list[Future[Any]]:
        """Those of `futures` that are done after at most POLL seconds. Raises what a task raised; DataError if a
        process died."""
        done = list(wait(futures, timeout=POLL, return_when=FIRST_COMPLETED).done)
        for future in done:
            error = future.exception()
            if isinstance(error, BrokenExecutor):
                raise _broken() from error
            if error is not None:
                raise error
        return done

    def _report(self, first: int, second: int) -> None:
        self._totals[0] += first
        self._totals[1] += second


def _broken() -> DataError:
    return DataError(
        "a worker process was killed or crashed, perhaps for want of memory: try fewer processes; finished parts are "
        "kept, run the command again"
    )


def _start(make: Callable[..., Any], arguments: tuple[Any, ...], totals: Any, lock: Path | None) -> None:
    """In a new worker process. The state is made by the first task, whose future takes an error to the caller."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the caller decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if lock is not None:
        _state["lock"] = open(lock)  # noqa: SIM115 (held until the process ends)
        fcntl.flock(_state["lock"], fcntl.LOCK_SH)

    def report(first: int, second: int) -> None:
        with totals.get_lock():
            totals[0] += first
            totals[1] += second

    _state["make"] = lambda: make(*arguments, report)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if "worker" not in _state:
        _state["worker"] = _state["make"]()
    return function(_state["worker"], *arguments)
