"""The same training computed in different ways: losses side by side, for `python -m scripts.loss_equality`.

Each variant is a launch of train.py in its own processes, with the same seed and global batches. All are compared with
one of them, by default `reference`: one process, nothing compiled, the chunked PyTorch form. The variants with half
micro-batches only cut the batch differently, as two processes do: their difference is rounding, and a yardstick.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.run.metrics import read_rows
from efla_lm.settings.fields import PATH, key
from scripts.study.checks import expect_above_zero, expect_at_least, expect_from
from scripts.study.launcher import ROOT, Launcher, python
from scripts.study.plot import new_figure, save_figure

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
    steps: int = key(100, "steps of training")
    batch_tokens: int = key(2048, "tokens of a global batch")
    context: int = key(64, "tokens of a sequence; torch.compile takes minutes on a CPU for long ones")
    precision: str = key("bf16", "compute type", choices=("fp32", "bf16"))
    train: list[str] = key([], "more overrides for every train.py, quoted")
    tolerance: float = key(0.02, "largest difference of a loss from the reference's, relative")
    limit_s: int | None = key(None, "seconds that all launches may take together; null: as long as they need")
    out: str = key("results/loss_equality.json", "result file; the plot is beside it", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that no comparison can use."""
        if self.variants is not None:
            expect_from(self, variants=list(VARIANTS))
        expect_at_least(self, 1, "steps", "context", "limit_s", "at_once")
        expect_above_zero(self, "tolerance")
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
    data = [f"data.dir={settings.data_dir}"] if settings.data_dir else []
    return [
        *python(processes), str(ROOT / "train.py"), f"model={settings.model}", f"size={settings.size}", *data,
        f"data.context={settings.context}", f"train.batch_tokens={settings.batch_tokens}",
        f"train.steps={settings.steps}", f"train.micro_tokens={settings.batch_tokens}",
        f"train.precision={settings.precision}", "train.log_every=1", "train.validate_every=null",
        "train.validate_batches=1", "train.save_every=null", f"runs_dir={runs}",
        f"name={folder_of(name)}", *settings.train,
        *(part.replace("${half}", str(half)) for part in overrides),
    ]  # fmt: skip


def run(settings: EqualitySettings, names: list[str], runs: Path) -> Iterator[tuple[str, list[float] | str]]:
    """Each variant's losses, or why it has none; `at_once` variants run side by side."""
    end = math.inf if settings.limit_s is None else time.monotonic() + settings.limit_s
    with Launcher(settings.at_once) as launcher:
        yield from launcher.map(lambda name: launch(settings, name, runs, end, launcher), names, in_order=True)


def launch(settings: EqualitySettings, name: str, runs: Path, end: float, launcher: Launcher) -> list[float] | str:
    """One variant's losses, or why it has none; it has until `end` on the monotonic clock."""
    left = end - time.monotonic()
    if left < 1:
        return "not run: limit_s was over"
    done = launcher.run(command(settings, name, runs), None if left == math.inf else left)
    if done.code != 0:
        return done.reason if done.code is not None else "not done when limit_s was over"
    folder = runs / folder_of(name)
    losses = [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]
    shutil.rmtree(folder)  # with its checkpoint and export, which are large
    return losses


def folder_of(name: str) -> str:
    """The name of a variant's run directory."""
    return name.replace(" ", "-").replace(",", "")


def relative_differences(losses: dict[str, list[float]], name: str, reference: str) -> list[float]:
    """|a - b| / |b| by step, of a variant's losses a from the reference's b."""
    return [abs(a - b) / abs(b) for a, b in zip(losses[name], losses[reference], strict=True)]


def differences(losses: dict[str, list[float]], reference: str) -> dict[str, dict[str, float]]:
    """By variant: the largest and the last relative difference of its losses from those of `reference`."""
    found = {name: relative_differences(losses, name, reference) for name in losses}
    return {name: {"largest": max(relative), "last": relative[-1]} for name, relative in found.items()}


def plot(result: dict[str, Any], path: Path) -> None:
    """Losses of all variants above, their relative differences from the reference below."""
    figure, axes = new_figure(2, 1, width=8, height=3.25, sharex=True, height_ratios=(2, 1))
    above, below = axes[:, 0]
    losses, about, settings = result["losses"], result["environment"], result["settings"]
    reference = settings.get("reference", "reference")  # older files always had that one
    for index, (name, curve) in enumerate(losses.items()):
        steps = range(1, len(curve) + 1)
        above.plot(steps, curve, label=name, linewidth=2.5 if index == 0 else 1, alpha=0.8)
        if name != reference:
            relative = relative_differences(losses, name, reference)
            below.plot(steps, relative, color=f"C{index}", linewidth=1)
    where = f"{about['gpu'] or 'CPU'}, torch {about['torch']}"
    above.set(ylabel="loss", title=f"{settings['model']}, {settings['size']}, {settings['precision']}, {where}")
    above.legend(fontsize=7)
    below.set(xlabel="step", ylabel=f"relative difference\nfrom {reference}")
    below.set_yscale("symlog", linthresh=1e-7)
    save_figure(figure, path, pdf=False)
