"""Worker processes for `prepare`: each is `python -m efla_data.corpus.workers FOLDER` and reads unit numbers.

One line of JSON each way: {"unit": i} with its limits in; {"bytes": .., "tokens": ..} while it works and {"done": i}
or {"error": ..} out. Plain subprocesses rather than multiprocessing, which would import the caller's main module (torch
and all) once more in every worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from efla_data.corpus.encode import TextEncoder
from efla_data.corpus.manifest import TokenizerInfo
from efla_data.corpus.recipe import Recipe
from efla_data.corpus.sources import Piece
from efla_data.corpus.tokenizer import find_tokenizer
from efla_data.corpus.unit import Limits, Report, process_unit, unit_prefix
from efla_data.errors import DataError

PLAN, INFO, TOKENIZER = "plan.json", "tokenizer_info.json", "tokenizer"  # names in OUT.partial
WORKERS_LOCK = "workers.lock"  # there too: shared by the workers of a run, so that the next one waits for their end


class Job:
    """A plan that lies in a folder (see `prepare`), ready to process any of its units in this process."""

    def __init__(self, folder: Path) -> None:
        plan: dict[str, Any] = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        self.folder = folder
        self.recipe = Recipe.from_dict(plan["recipe"])
        self.units = [[Piece(**piece) for piece in unit] for unit in plan["units"]]
        info = TokenizerInfo(**json.loads((folder / INFO).read_text(encoding="utf-8")))
        self.encoder = TextEncoder(find_tokenizer(str(folder / TOKENIZER)).backend, info)

    def run(self, unit: int, limits: Limits, report: Report) -> None:
        """Process one unit; its result lies in the folder afterwards."""
        process_unit(self.units[unit], self.recipe, self.encoder, unit_prefix(self.folder, unit), limits, report)


def worker_environment() -> dict[str, str]:
    """What a subprocess needs to import what this process imports."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Worker:
    """One subprocess; `run` blocks until its unit is done."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "efla_data.corpus.workers", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=worker_environment(),
        )

    def run(self, unit: int, limits: Limits, report: Report) -> None:
        """Have one unit processed. DataError and OSError of the worker are raised here; so is its death."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the loop below finds out why
            print(json.dumps({"unit": unit, **dataclasses.asdict(limits)}), file=self.process.stdin, flush=True)
        for line in self.process.stdout:
            message = json.loads(line)
            if "done" in message:
                return
            if "error" in message:
                if message["errno"] is not None:
                    raise OSError(message["errno"], message["error"], message["filename"])
                raise DataError(message["error"])
            report(message["bytes"], message["tokens"])
        code = self.process.wait()
        hint = "killed, perhaps for want of memory: try fewer processes" if code < 0 else "see its traceback above"
        raise DataError(
            f"a worker ended with exit code {code} ({hint}); finished parts are kept, run the command again"
        )

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that was never read
                    pipe.close()


def main() -> None:
    """The worker's side. Ends with its input: when the caller is gone, so is the worker, at its next report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the caller decides
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever libraries print must not end up between the messages

    def send(**message: Any) -> None:
        print(json.dumps(message), file=out, flush=True)

    job = Job(Path(sys.argv[1]))
    lock = open(job.folder / WORKERS_LOCK)  # noqa: SIM115 (held to the end of the process)
    fcntl.flock(lock, fcntl.LOCK_SH)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            limits = Limits(request["max_tokens"], request["below"])
            job.run(request["unit"], limits, lambda size, tokens: send(bytes=size, tokens=tokens))
        except BrokenPipeError:
            return
        except DataError as error:
            send(error=str(error), errno=None)
        except OSError as error:
            send(error=error.strerror or str(error), errno=error.errno or 0, filename=error.filename)
        else:
            send(done=request["unit"])


if __name__ == "__main__":
    main()
