"""Sequential MNIST under corruption, the paper's Figures 1 and 2: `python -m scripts.smnist images.source=mnist.npz`.

    setting=paper    all training images; each mixer is tested under corruption at the rate of the authors' script,
                     1e-3 for DeltaNet and 3e-3 for EFLA
    setting=strict   5,000 training images held out; the same rates, seeds and budget for every mixer, each tested at
                     every rate; a mixer's best rate is the one that does best on the held-out images
    grid=pooled      14 x 14 images (196 tokens, not the paper's setting), strict at one rate and seed: CPU minutes
    replot=[a.json]  figures and tables again from result files, several of one setting together in one JSON

All seeds and rates of a mixer are trained as one stack. A stopped command continues with the next mixer.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from efla_data.tasks.smnist import Digits, as_pixels, load_digits, pool

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.settings import PATH, PATH_OR_HUB, entry, key
from scripts.smnist import report
from scripts.smnist.training import (
    Classifier,
    Member,
    Preparation,
    TrainingPlan,
    accuracy,
    chosen,
    timed,
    train,
    under_corruption,
)
from scripts.stacked.rules import RECURRENT_MIXERS
from scripts.study import result_file
from scripts.study.checks import expect_above_zero, expect_at_least, expect_backend, expect_from
from scripts.study.progress import ProgressLine


@dataclass
class ImageSettings:
    """Which images, and what is done to them."""

    source: str = key("ylecun/mnist", "a .npz, a folder of idx files, a hub data set, or synthetic", path=PATH_OR_HUB)
    pool: int = key(1, "mean over blocks of pool x pixels; 2 gives 196 tokens, not the paper's setting")
    normalise: bool = key(False, "subtract MNIST's mean and divide by its deviation, after the corruption")
    clip: bool = key(False, "back into [0, 1] after the corruption")
    test: int | None = key(None, "first test images only; null: all")
    corrupted: int | None = key(None, "first test images only for the corruptions; null: all of test")
    validation: int = key(5000, "training images held out in setting=strict")


@dataclass
class SmnistSettings:
    """All of `python -m scripts.smnist`."""

    setting: str = key("paper", "which comparison, see above", choices=("paper", "strict"))
    mixers: list[str] = key(["deltanet", "efla"], f"among {', '.join(RECURRENT_MIXERS)}")
    rates: list[float] = key([1e-4, 3e-4, 1e-3, 3e-3, 1e-2], "learning rates [paper, section 4]")
    script_rates_only: bool = key(False, "train at the public script's rates alone, not at `rates`")
    seeds: list[int] = key([0, 1, 2], "seeds of initial weights and of the order of the images")
    epochs: int = key(1, "passes over the training images [paper, section 4]")
    steps: int | None = key(None, "stop after this many steps; null: whole epochs")
    batch: int = key(128, "images per step [paper, section 4]")
    images: ImageSettings = field(default_factory=ImageSettings)
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    backend: str = key("auto", "implementation of the ops", choices=("auto", "torch", "reference", "triton", "fla"))
    figures: bool = key(True, "draw the figures, not only JSON, CSV and table")
    out: str = key("results/smnist", "folder of what is written", path=PATH)
    replot: list[str] = key([], "result files to report on, instead of training")

    def validate(self) -> None:
        """Raise UserError for values that no experiment can use."""
        expect_from(self, mixers=RECURRENT_MIXERS)
        expect_above_zero(self, "rates")
        expect_at_least(self, 0, "seeds")
        expect_at_least(self, 1, "epochs", "batch", "steps", "images.pool", "images.test", "images.corrupted")


@entry("smnist", SmnistSettings)
def main(settings: SmnistSettings) -> None:
    """Train classifiers of pixel sequences, test them under corruption, write JSON, CSV, table and figures."""
    folder = Path(settings.out)
    if settings.replot:
        contents = [result_file.read(path, experiment="smnist") for path in settings.replot]
        print(report.write_report(contents, folder, settings.figures))
        setting, runs = report.gather(contents)
        result_file.write(folder / f"{setting}.json", result_file.merge(contents, runs))
        print(f"written to {folder}")
        return
    device = choose_device(settings.device)
    expect_backend(settings.backend, device)
    path = folder / f"{settings.setting}.json"
    result_file.check_output(path)
    digits = load_digits(settings.images.source)
    pixels = as_pixels(pool(digits.train_images, settings.images.pool))
    held = settings.images.validation if settings.setting == "strict" else 0
    if held >= len(pixels) or (settings.setting == "strict" and held < 1):
        raise UserError(f"images.validation={held}: expected from 1 to below the {len(pixels)} training images")
    plan = TrainingPlan(batch=settings.batch, epochs=settings.epochs, steps=settings.steps)
    count = len(pixels) - held
    images = {"source": Path(digits.source).name, "tokens": pixels.shape[1], "train": count}
    head = {
        "experiment": "smnist",
        "setting": settings.setting,
        "images": asdict(settings.images) | images,
        "plan": {**asdict(plan), "steps": plan.count(count)},
        "environment": result_file.environment(device),
        "command": result_file.command_line("smnist", settings),
        "settings": result_file.portable(settings, without=("mixers", "figures", "replot")),
    }
    result = result_file.ResultFile(path, head, ("mixer", "rate", "seed"), rows="runs")
    for mixer in result.missing(settings.mixers):
        for run in run_mixer(settings, mixer, digits, pixels, held, plan, device):
            result.add(run)
    print(report.write_report([result.content], folder, settings.figures))
    print(f"written to {folder}")


def run_mixer(
    settings: SmnistSettings, mixer: str, digits: Digits, pixels: np.ndarray, held: int, plan: TrainingPlan,
    device: torch.device,
) -> list[dict]:  # fmt: skip
    """Train and test the stack of one mixer; one result for each member (rate and seed)."""
    rates = [report.script_rate(mixer)] if settings.script_rates_only else list(settings.rates)
    members = [Member(seed, rate) for rate in rates for seed in settings.seeds]
    prepare = Preparation(settings.images.normalise, settings.images.clip)
    split = np.random.default_rng(0).permutation(len(pixels)) if held else np.arange(len(pixels))
    x, y = (torch.from_numpy(a[split]).to(device) for a in (pixels, digits.train_labels))
    test_images = as_pixels(pool(digits.test_images[: settings.images.test], settings.images.pool))
    test_labels = torch.from_numpy(digits.test_labels[: settings.images.test]).to(device)
    model = Classifier(mixer, len(members), pixels.shape[1], settings.backend).to(device)
    line = ProgressLine(f"{mixer}, {len(members)} models")
    curves, seconds = timed(lambda: train(model, members, x[held:], y[held:], plan, prepare, line.step), device)
    line.end(f"trained in {seconds:.1f} s")
    validation = accuracy(model, x[:held], y[:held], prepare) if held else [None] * len(members)
    test = accuracy(model, torch.from_numpy(test_images).to(device), test_labels, prepare)
    tested = [n for n, m in enumerate(members) if settings.setting == "strict" or m.rate == report.script_rate(mixer)]
    found: list[Any] = []
    spent = 0.0
    if tested:
        some, first = chosen(model, tested), slice(settings.images.corrupted)
        found, spent = timed(
            lambda: under_corruption(some, test_images[first], test_labels[first], prepare, seed=0), device
        )
    line.end(f"tested under corruption in {spent:.1f} s; clean accuracy " + " ".join(f"{100 * a:.1f}" for a in test))
    corrupted = dict(zip(tested, found))
    return [
        {
            "mixer": mixer, "rate": member.rate, "seed": member.seed, "train": curves[n],
            "validation_accuracy": validation[n], "test_accuracy": test[n], "corruptions": corrupted.get(n),
            "seconds": {"stack_training": round(seconds, 2), "stack_corruptions": round(spent, 2)},
            "stacked": len(members),
        }
        for n, member in enumerate(members)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
