"""A process that runs train.py again and again, so that imports and compiled kernels serve many runs.

`train` is what a process pool calls. A run stops as on SIGTERM, saved, once `stop` is set, the deadline has passed, or
the study's own process has ended.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path

import torch
import torch._dynamo

ROOT = Path(__file__).resolve().parents[2]
POLL_SECONDS = 0.2
RECOMPILE_LIMIT = 64  # a process compiles two graphs (training, validation) for each arm; torch allows 8
_stop: Event | None = None


def initialise(stop: Event) -> None:
    """Called once in every process of the pool. Outside of train.py a signal has nothing to save: the study decides."""
    global _stop
    _stop = stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # SIG_IGN would pass to the compiler's processes
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT


def train(arguments: Sequence[str], log: Path, deadline: float | None, delay: float = 0.0) -> tuple[int, float]:
    """Run `train.py ARGUMENTS` in this process, its output appended to `log`; (exit code, seconds).

    An exception is a traceback in the log and exit code 1.

    deadline: the time (`time.time`) at which the run saves and stops, or None. delay: seconds to wait first.
    """
    time.sleep(delay)
    begin, command = time.perf_counter(), sys.argv
    sys.argv = [str(ROOT / "train.py"), *arguments]
    try:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(open(log, "a", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(out))
            stack.enter_context(_stopping(deadline))
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:
        code = 1
        with open(log, "a", encoding="utf-8") as out:
            traceback.print_exc(file=out)
    finally:
        sys.argv = command
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return code, time.perf_counter() - begin


@contextlib.contextmanager
def _stopping(deadline: float | None) -> Iterator[None]:
    """Send this process SIGTERM, again until the `with` ends, from the moment at which the run shall stop."""
    ended, parent = threading.Event(), os.getppid()

    def watch() -> None:
        while not ended.wait(POLL_SECONDS):
            late = deadline is not None and time.time() > deadline
            if late or os.getppid() != parent or (_stop is not None and _stop.is_set()):
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
