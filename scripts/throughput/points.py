"""The points of `scripts.throughput` (model, size, shape, implementation) and how each is run.

Every point runs in processes of its own (`scripts.throughput.point`) with a time limit, so that its start-up time is
that of a launch, and one that fails or runs out of memory leaves the others alone. A row has the columns of
`point.measure` and `model, size, impl, batch, tokens, gpus, parallel, options, caches, at_once, windows, updates,
commit`; one without figures has `skipped`, the reason, instead.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from efla_data.corpus.writer import write_token_files

from scripts.study.checks import parse_shapes
from scripts.study.launcher import Launcher, python
from scripts.throughput.settings import PEERS, ThroughputSettings

Row = dict[str, Any]
ASKED = ("caches", "at_once", "windows", "updates")  # settings that every row names
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
    """The points in the order of running: small sizes first, ours before fla's."""
    options = {"efla_lm": tuple(settings.train), "fla": () if settings.peer_waits else ("peer_waits=false",)}
    return [
        Plan(model, size, impl, batch, tokens, settings.gpus, mode, options[impl])
        for size in settings.sizes
        for impl in settings.impls
        for model in settings.models
        if impl == "efla_lm" or model in PEERS
        for batch, tokens in parse_shapes(settings.shapes)
        for mode in settings.modes
    ]


def key(row: Row) -> tuple[Any, ...]:
    """What tells two points apart."""
    return tuple(str(row.get(name)) for name in KEY)


def run_all(settings: ThroughputSettings, earlier: Mapping[tuple[Any, ...], Row]) -> Iterator[Row]:
    """The row of each point as it is done, `at_once` of them side by side. Points with figures in `earlier` are left
    out unless `redo`."""
    begin = time.monotonic()
    missing = {"skipped": ""}
    todo = [p for p in plans(settings) if settings.redo or "skipped" in earlier.get(key(p.row()), missing)]
    with tempfile.TemporaryDirectory(prefix="efla-throughput-") as name, Launcher(settings.at_once) as launcher:
        folder = Path(name)
        data_dir = random_text(folder / "tokens", settings.vocab_size)

        def run_point(number: int) -> Row | None:
            limit = settings.limit_s
            if settings.budget_s is not None:
                limit = min(limit, int(settings.budget_s - (time.monotonic() - begin)))
            place = folder / f"point-{number}"
            place.mkdir()
            return run(todo[number], settings, data_dir, place, limit, launcher) if limit >= 1 else None

        for number, found in launcher.map(run_point, range(len(todo))):
            if found is not None:
                yield todo[number].row() | {name: getattr(settings, name) for name in ASKED} | found


def run(
    plan: Plan, settings: ThroughputSettings, data_dir: Path, place: Path, limit_s: float, launcher: Launcher
) -> Row:
    """The figures of one point, or {"skipped": why}."""
    point = asdict(plan)
    del point["options"]
    lock = str(data_dir.parent / "turn") if settings.at_once > 1 else ""
    point |= {"overrides": plan.overrides(data_dir, settings), "started": time.time(), "lock": lock}
    point |= {name: getattr(settings, name) for name in ("warmup", "windows", "updates", "profile", "peer_waits")}
    (place / "spec.json").write_text(json.dumps(point), encoding="utf-8")
    files = [str(place / "spec.json"), str(place / "row.json")]
    caches = None if settings.caches == "kept" else place / "caches"
    command = [*python(plan.gpus), "-m", "scripts.throughput.point", *files]
    done = launcher.run(command, limit_s, env=cache_environment(caches))
    if done.code is None:
        return {"skipped": f"not done after {limit_s:.0f} s"}
    return dict(json.loads(Path(files[1]).read_text(encoding="utf-8"))) if done.code == 0 else {"skipped": done.reason}


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
    (folder / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")  # must exist; it is not read
    return folder
