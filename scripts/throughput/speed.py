"""Speed of training by model, size, shape and implementation: the points of `scripts.throughput` and how each is run.

Every point runs in processes of its own (`train_point`) with a time limit, so that its start-up time is that of a
launch, and one that fails or runs out of memory leaves the others alone. A row has the columns of `train_point.measure`
and `model, size, impl, batch, tokens, gpus, parallel, options, caches, at_once, windows, updates, commit`; one without
figures has `skipped`, the reason, instead.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from efla_data.corpus.writer import write_token_files

from scripts.study.setting_checks import pairs
from scripts.throughput.settings import PEERS, ThroughputSettings

Row = dict[str, Any]
ASKED = ("caches", "at_once", "windows", "updates")  # of the settings, in every row
KEY = ("model", "size", "impl", "batch", "tokens", "gpus", "parallel", "options")


@dataclass(frozen=True)
class Plan:
    """A point before it is run."""

    model: str
    size: str
    impl: str
    batch: int
    tokens: int
    gpus: int
    parallel: str
    options: tuple[str, ...]

    def row(self) -> Row:
        """The columns that say which point it is."""
        return asdict(self) | {"options": list(self.options)}

    def overrides(self, data_dir: Path, settings: ThroughputSettings) -> list[str]:
        """train.py's command line for this point."""
        total = settings.warmup + 1 + settings.windows * settings.updates + settings.profile
        return [
            f"model={self.model}", f"size={self.size}", f"parallel={self.parallel}", f"data.dir={data_dir}",
            f"data.context={self.tokens}", f"model.vocab_size={settings.vocab_size}", f"train.micro_batch={self.batch}",
            f"train.batch_tokens={self.batch * self.tokens * self.gpus}", f"train.steps={total}",
            f"train.device={settings.device}", *(self.options if self.impl == "efla_lm" else ()),
        ]  # fmt: skip


def plans(settings: ThroughputSettings) -> list[Plan]:
    """The points in the order of running: ours first, small sizes first."""
    options = {"efla_lm": tuple(settings.train), "fla": () if settings.peer_waits else ("peer_waits=false",)}
    return [
        Plan(model, size, impl, batch, tokens, settings.gpus, mode, options[impl])
        for size in settings.sizes
        for impl in settings.impls
        for model in settings.models
        if impl == "efla_lm" or model in PEERS
        for batch, tokens in pairs(settings.shapes)
        for mode in settings.modes
    ]


def key(row: Row) -> tuple[Any, ...]:
    """What tells two points apart."""
    return tuple(str(row.get(name)) for name in KEY)


def run_all(settings: ThroughputSettings, held: Mapping[tuple[Any, ...], Row]) -> Iterator[Row]:
    """The row of each point as it comes, `at_once` of them under way; those in `held` are left out unless `redo`."""
    begin = time.monotonic()
    missing = {"skipped": ""}
    todo = [p for p in plans(settings) if settings.redo or "skipped" in held.get(key(p.row()), missing)]
    with tempfile.TemporaryDirectory(prefix="efla-throughput-") as name, ThreadPoolExecutor(settings.at_once) as pool:
        folder = Path(name)
        data_dir = random_text(folder / "tokens", settings.vocab_size)
        started: set[subprocess.Popen[bytes]] = set()

        def point(number: int, plan: Plan) -> Row | None:
            left = settings.limit_s
            if settings.budget_s is not None:
                left = min(left, int(settings.budget_s - (time.monotonic() - begin)))
            if left < 1:
                return None
            place = folder / f"point-{number}"
            place.mkdir()
            found = run(plan, settings, data_dir, place, left, started)
            return plan.row() | {name: getattr(settings, name) for name in ASKED} | found

        waiting: list[Future[Row | None]] = []
        try:
            waiting.extend(pool.submit(point, number, plan) for number, plan in enumerate(todo))
            yield from (row for future in as_completed(waiting) if (row := future.result()) is not None)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in waiting):  # one may be about to start its process
                for process in list(started):
                    end(process)
                time.sleep(0.05)


def run(
    plan: Plan, settings: ThroughputSettings, data_dir: Path, place: Path, limit_s: float, started: set[Any]
) -> dict[str, Any]:
    """The figures of one point, or {"skipped": why}; its process is among `started` while it runs."""
    caches = None if settings.caches == "kept" else place / "caches"
    point = asdict(plan)
    del point["options"]
    lock = str(data_dir.parent / "turn") if settings.at_once > 1 else ""
    point |= {"overrides": plan.overrides(data_dir, settings), "started": time.time(), "lock": lock}
    point |= {name: getattr(settings, name) for name in ("warmup", "windows", "updates", "profile", "peer_waits")}
    (place / "spec.json").write_text(json.dumps(point), encoding="utf-8")
    launcher = ["-m"]
    if plan.gpus > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.gpus}", "-m"]
    files = [str(place / "spec.json"), str(place / "row.json")]
    command = [sys.executable, *launcher, "scripts.throughput.point", *files]
    with open(place / "output.txt", "w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, env=cache_environment(caches), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        started.add(process)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"skipped": f"not done after {limit_s:.0f} s"}
        finally:
            end(process)
            started.discard(process)
        if code == 0:
            return dict(json.loads((place / "row.json").read_text(encoding="utf-8")))
        output.seek(0)
        return {"skipped": reason(output.read()) or f"exit code {code}"}


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop what is left of a point: the process, and the workers that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def reason(output: str) -> str:
    """The line of a failed process's output that says why: the last error of a traceback, cut to 300 characters."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line.strip()) for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*([Ee]rror|Exception)\b", line)]
    errors = [line for line in errors if not line.startswith("torch.distributed.elastic")]  # torchrun: some rank failed
    return (errors or lines or [""])[-1][:300]


def cache_environment(caches: Path | None) -> dict[str, str]:
    """The environment with all compilers' caches under `caches`; None: where they are."""
    if caches is None:
        return dict(os.environ)
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}
    return {**os.environ, **{name: str(caches / folder) for name, folder in places.items()}}


def random_text(folder: Path, vocab_size: int, tokens: int = 1 << 21) -> Path:
    """Token files of ids that are as frequent as words are (1 / rank), so that losses fall as they do on text."""
    rng = np.random.default_rng(0)
    ids = np.minimum(vocab_size ** rng.random(tokens), vocab_size - 1).astype(np.int64)
    ends = np.arange(1000, tokens + 1, 1000)
    ids[ends - 1] = 0
    documents = np.split(ids[: ends[-1]], ends[:-1])
    write_token_files(folder, {"train": documents}, vocab_size, eos_id=0)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")  # must be there; nobody reads it
    return folder
