"""The settings of the study, and the trials that they mean."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from efla_lm.errors import UserError
from efla_lm.settings import PATH, key
from scripts.study.checks import expect_above_zero, expect_at_least


@dataclass
class LmStudySettings:
    """All of `python -m scripts.lm_study`."""

    name: str = key("factorial", "label of the study in its results")
    arms: list[str] = key(
        ["deltanet", "efla_gate", "efla_value", "efla"], "models (model=NAME); the first is the baseline"
    )
    rates: list[float] = key([5e-4, 1e-3, 2e-3, 4e-3, 8e-3], "peak learning rates, the same for every arm")
    seeds: list[int] = key([1, 2, 3], "seeds of initial weights and data order, the same for every arm")
    sweep_seeds: int = key(
        1,
        "how many of the seeds train at every rate; the others train every arm at the rates that are best for some arm",
    )
    size: str = key("50m", "widths (size=NAME)")
    data_dir: str = key("data/tokens/local", "folder of token files with a held-out split", path=PATH)
    context: int = key(2048, "positions of a window")
    tokens: int = key(81_788_928, "training tokens of a run, rounded up to whole updates")
    batch_tokens: int = key(32768, "tokens of a global batch")
    warmup: float = key(0.1, "share of the updates in the warm-up")
    floor: float = key(0.1, "first and last learning rate as a share of the peak (cosine)")
    validations: int = key(4, "validations of a run on all held-out text, the last update's included")
    train: list[str] = key([], "more overrides for every train.py, quoted: \"train=['train.compile=false']\"")
    parallel_runs: int = key(1, "runs that share the GPU at a time")
    budget_seconds: float | None = key(
        None, "after so many seconds runs save and stop, and the same command continues; null: until all is done"
    )
    save_every: int | None = key(None, "updates between checkpoints; null: when a run is stopped and at its end")
    keep_runs: bool = key(False, "keep checkpoint and export of a run that is done")
    runs_dir: str = key("runs/lm_study", "folder of the run directories, in a folder of the study's name", path=PATH)
    figures: bool = key(True, "draw the figures, not only JSON and tables")
    out: str = key("results/lm_study", "folder of what is written", path=PATH)
    replot: str | None = key(None, "result file to report on, instead of training", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that no study can use."""
        for name in ("arms", "rates", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise UserError(f"{name}: got {values}, expected at least one, each once")
        expect_above_zero(self, "rates")
        expect_at_least(self, 1, "context", "tokens", "batch_tokens", "validations", "parallel_runs", "budget_seconds")
        if not 1 <= self.sweep_seeds <= len(self.seeds):
            raise UserError(
                f"sweep_seeds: got {self.sweep_seeds}, expected 1 to {len(self.seeds)}, the number of seeds"
            )
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}: got {getattr(self, name)}, expected a share from 0 to 1")

    @property
    def steps(self) -> int:
        """Updates of a run."""
        return -(-self.tokens // self.batch_tokens)

    @property
    def runs(self) -> Path:
        """Folder of this study's run directories."""
        return Path(self.runs_dir) / self.name


@dataclass(frozen=True)
class Trial:
    """One training run of the study."""

    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        """The run directory's name."""
        return f"{self.arm}-{self.rate:g}-seed{self.seed}"


def train_arguments(trial: Trial, settings: LmStudySettings) -> list[str]:
    """The command line of train.py for one trial."""
    steps, save = settings.steps, settings.save_every
    return [
        f"model={trial.arm}", f"size={settings.size}", "data=local", f"data.dir={settings.data_dir}",
        f"data.context={settings.context}", f"seed={trial.seed}", f"name={trial.name}", f"runs_dir={settings.runs}",
        f"train.steps={steps}", f"train.batch_tokens={settings.batch_tokens}",
        f"schedule.peak={trial.rate!r}", f"schedule.initial={settings.floor * trial.rate!r}",
        f"schedule.final={settings.floor * trial.rate!r}",
        f"schedule.warmup_updates={max(1, round(settings.warmup * steps))}",
        f"train.log_every={max(1, steps // 50)}", f"train.validate_every={-(-steps // settings.validations)}",
        f"train.save_every={'null' if save is None else save}", "train.keep_checkpoints=1", *settings.train,
    ]  # fmt: skip


def sweep(settings: LmStudySettings) -> list[Trial]:
    """Every arm at every rate for the first `sweep_seeds` seeds, the arms of one rate next to each other."""
    seeds = settings.seeds[: settings.sweep_seeds]
    return [Trial(arm, rate, seed) for seed in seeds for rate in settings.rates for arm in settings.arms]


def repeats(settings: LmStudySettings, rates: Sequence[float]) -> list[Trial]:
    """Every arm at `rates` for the seeds that the sweep left out."""
    seeds = settings.seeds[settings.sweep_seeds :]
    return [Trial(arm, rate, seed) for seed in seeds for rate in rates for arm in settings.arms]
