"""The same training computed in different ways: losses side by side, for `python -m scripts.loss_equality`.

Each variant is a launch of train.py in its own processes, with the same seed and global batches. They are compared with
one of them, `reference` if no other is named: one process, nothing compiled, the chunked PyTorch form. Those with half
micro-batches only cut the batch differently, as two processes do: what they differ by is rounding, a yardstick.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from efla_lm.errors import UserError
from efla_lm.run.metrics import read_rows
from efla_lm.settings.fields import PATH, key
from scripts.throughput.speed import reason

ROOT = Path(__file__).resolve().parents[2]
PLAIN = ("train.compile=false", "train.cuda_graphs=off", "train.activation_checkpointing=none")
# name: (processes, needs a GPU, settings)
VARIANTS: dict[str, tuple[int, bool, tuple[str, ...]]] = {
    "reference": (1, False, (*PLAIN, "model.backend=torch")),
    "half micro-batches": (1, False, (*PLAIN, "model.backend=torch", "train.micro_tokens=${half}")),
    "compiled": (1, False, ("train.compile=true", "model.backend=torch")),
    "selective, not compiled": (1, False, (*PLAIN[:2], "train.activation_checkpointing=selective")),
    "2 processes, fsdp": (2, False, ("parallel=fsdp",)),
    "2 processes, ddp": (2, False, ("parallel=ddp",)),
    "triton": (1, True, (*PLAIN, "model.backend=triton")),
    "triton, compiled": (1, True, ("model.backend=triton", "train.cuda_graphs=off")),
    "triton, compiled, graphs": (1, True, ("model.backend=triton", "train.cuda_graphs=on")),
    "triton, half micro-batches": (1, True, ("model.backend=triton", "train.micro_tokens=${half}")),
    "triton, states recomputed": (1, True, ("model.backend=triton_recompute",)),
}


@dataclass
class EqualitySettings:
    """What is compared, how long, and where it goes."""

    variants: list[str] | None = key(None, f"of {', '.join(VARIANTS)}; null: all that this machine can run")
    reference: str = key("reference", "the variant that the others are compared with", choices=tuple(VARIANTS))
    at_once: int = key(1, "variants that run at the same time, one-process ones on the same GPU")
    model: str = key("efla", "option of conf/model")
    size: str = key("tiny", "option of conf/size")
    data_dir: str | None = key(None, "token files; null: the built-in corpus, prepared as `make demo` does", path=PATH)
    steps: int = key(100, "updates")
    batch_tokens: int = key(2048, "tokens of a global batch")
    context: int = key(64, "window; torch.compile takes minutes on a CPU for long ones")
    precision: str = key("bf16", "compute type", choices=("fp32", "bf16"))
    train: list[str] = key([], "more overrides for every train.py, quoted")
    tolerance: float = key(0.02, "largest difference of a loss from the reference's, relative")
    limit_s: int = key(220, "seconds that all launches may take together; those left then are not run")
    out: str = key("results/loss_equality.json", "result file; the plot is beside it", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that nothing can be compared with."""
        unknown = [name for name in self.variants or [] if name not in VARIANTS]
        if unknown:
            raise UserError(f"variants={unknown}: expected a list from {', '.join(VARIANTS)}")
        for name in ("steps", "context", "limit_s", "tolerance", "at_once"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)}: expected more than 0")
        if self.batch_tokens % (2 * self.context):
            raise UserError(f"batch_tokens={self.batch_tokens}: expected a multiple of 2 x context={self.context}")


def chosen(settings: EqualitySettings, gpus: int) -> list[str]:
    """The variants to run, the reference first."""
    names = settings.variants or [
        name for name, (processes, gpu, _) in VARIANTS.items() if gpus >= (processes if gpus else 1) * gpu
        and not (gpus and processes > gpus)
    ]  # fmt: skip
    return [settings.reference, *(name for name in names if name != settings.reference)]


def command(settings: EqualitySettings, name: str, runs: Path) -> list[str]:
    """The launch of a variant."""
    processes, _, overrides = VARIANTS[name]
    half = settings.batch_tokens // 2
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] * (processes > 1)
    data = [f"data.dir={settings.data_dir}"] if settings.data_dir else []
    return [
        sys.executable, *launcher, str(ROOT / "train.py"), f"model={settings.model}", f"size={settings.size}", *data,
        f"data.context={settings.context}", f"train.batch_tokens={settings.batch_tokens}",
        f"train.steps={settings.steps}", f"train.micro_tokens={settings.batch_tokens}",
        f"train.precision={settings.precision}", "train.log_every=1", "train.validate_every=null",
        "train.validate_batches=1", "train.save_every=null", f"runs_dir={runs}",
        f"name={name.replace(' ', '-').replace(',', '')}", *settings.train,
        *(part.replace("${half}", str(half)) for part in overrides),
    ]  # fmt: skip


class Processes:
    """Of several threads, each in a session of its own; `stop` ends those that run and those that start later."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []
        self._stopped, self._lock = False, Lock()

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        """A process whose output is kept for `communicate`."""
        with self._lock:
            process = subprocess.Popen(
                arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
            self._started.append(process)
            if self._stopped:
                self.kill(process)
            return process

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._started:
                self.kill(process)

    @staticmethod
    def kill(process: subprocess.Popen[str]) -> None:
        """End a process and all that it started, if it has not ended."""
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended since
                os.killpg(process.pid, signal.SIGKILL)


def run(settings: EqualitySettings, names: list[str], runs: Path) -> Iterator[tuple[str, list[float] | str]]:
    """Each variant's losses, or why it has none."""
    end = time.monotonic() + settings.limit_s
    processes = Processes()
    with ThreadPoolExecutor(settings.at_once) as pool:
        found = [pool.submit(launch, settings, name, runs, end, processes) for name in names]
        try:
            for name, future in zip(names, found, strict=True):
                yield name, future.result()
        finally:  # who stops asking, as after a reference that failed, waits for no other
            pool.shutdown(wait=False, cancel_futures=True)
            processes.stop()


def launch(settings: EqualitySettings, name: str, runs: Path, end: float, processes: Processes) -> list[float] | str:
    """One variant's losses, or why it has none; it has until `end` on the monotonic clock."""
    left = end - time.monotonic()
    if left < 1:
        return "not run: limit_s was over"
    process = processes.start(command(settings, name, runs))
    try:
        printed, _ = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        processes.kill(process)
        process.wait()
        return "not done when limit_s was over"
    if process.returncode:
        return reason(printed) or f"exit code {process.returncode}"
    folder = runs / name.replace(" ", "-").replace(",", "")
    losses = [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]
    shutil.rmtree(folder)  # with its checkpoint and export, which are large
    return losses


def differences(losses: dict[str, list[float]], compared_with: str) -> dict[str, dict[str, float]]:
    """By variant: the largest and the last relative difference of its losses from those of `compared_with`."""
    reference = losses[compared_with]
    found = {}
    for name, curve in losses.items():
        relative = [abs(a - b) / abs(b) for a, b in zip(curve, reference, strict=True)]
        found[name] = {"largest": max(relative), "last": relative[-1]}
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Losses of all variants above, their relative differences from the reference below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(2, 1))
    losses, compared_with = result["losses"], result["settings"]["reference"]
    for index, (name, curve) in enumerate(losses.items()):
        steps = range(1, len(curve) + 1)
        above.plot(steps, curve, label=name, linewidth=2.5 if index == 0 else 1, alpha=0.8)
        if name != compared_with:
            relative = [abs(a - b) / abs(b) for a, b in zip(curve, losses[compared_with], strict=True)]
            below.plot(steps, relative, color=f"C{index}", linewidth=1)
    about, settings = result["environment"], result["settings"]
    above.set(ylabel="loss", title=f"{settings['model']}, {settings['size']}, {settings['precision']}, "
              f"{about['gpu'] or 'CPU'}, torch {about['torch']}")  # fmt: skip
    above.legend(fontsize=7)
    below.set(xlabel="update", ylabel=f"relative difference\nfrom {compared_with}")
    below.set_yscale("symlog", linthresh=1e-7)
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
