"""Start training in a test: in this process, or in several started by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import train
from efla_lm.run.checkpoint import load_model_weights
from efla_lm.run.metrics import read_rows

ROOT = Path(__file__).resolve().parents[2]
TINY = [
    "data.context=16", "train.batch_tokens=64", "train.micro_tokens=32", "train.device=cpu", "train.log_batches=true",
    "model.hidden_size=32", "model.num_heads=2", "model.head_dim=16", "model.num_hidden_layers=2",
    "model.intermediate_size=48", "model.state_size=16", "model.mamba_head_dim=16", "schedule.peak=0.01",
    "schedule.warmup_updates=10", "train.log_every=1", "train.validate_every=null", "train.save_every=null",
    "train.keep_checkpoints=null",
]  # fmt: skip
MODELS = ("efla", "gated_efla", "deltanet", "gated_deltanet", "mamba2", "transformer")
SPEED = ("tokens_per_second", "mfu", "seconds", "peak_memory_gib")  # what differs between equal runs


def arguments(corpus: Path, runs: Path, *overrides: str) -> list[str]:
    return [f"data.dir={corpus}", f"runs_dir={runs}", *TINY, *overrides]


def run_here(corpus: Path, runs: Path, *overrides: str) -> int:
    """Train in this process and return the exit code."""
    with one_thread():
        return train.main.run(arguments(corpus, runs, *overrides), program="train.py")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_ranks(processes: int, script: Path, *script_arguments: str, timeout: float = 300) -> str:
    """Run a script under torchrun on this machine's CPU; returns what it printed, fails if it fails."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)]
    return run_command([sys.executable, *command, *script_arguments], timeout=timeout, expect=0)[1]


def run_command(
    command: list[str], *, timeout: float = 120, expect: int | None = None, env: dict[str, str] | None = None
) -> tuple[int, str]:
    """Exit code and output (both streams) of a command at the root of the project."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "MASTER_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | (env or {})
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if expect is not None:
        assert done.returncode == expect, done.stdout
    return done.returncode, done.stdout


def weights(runs: Path, name: str, step: int) -> dict[str, Tensor]:
    return load_model_weights(runs / name / "checkpoints" / f"step-{step}")


def assert_same_weights(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        difference = (tensor - b[name]).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference}"


def consumed(runs: Path, name: str) -> list[list[int]]:
    """Window ids of each update; the steps must be 0, 1, 2, ..."""
    rows = [json.loads(line) for line in (runs / name / "batches.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["window_ids"] for row in rows]


def metrics(runs: Path, name: str, key: str = "loss") -> list[Any]:
    return [row[key] for row in read_rows(runs / name / "metrics.jsonl") if key in row]


def steady_rows(runs: Path, name: str) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without the figures of speed."""
    rows = read_rows(runs / name / "metrics.jsonl")
    return [{key: value for key, value in row.items() if key not in SPEED} for row in rows]
