"""Train and evaluate all models of the paper's Table 1 at one size, then build the table.

    python -m scripts.reproduce_table1 size=340m gpus=8 data_dir=/data/slimpajama

It prints what is left to do and its cost, then runs the commands that a user would type. It can be stopped (Ctrl-C,
SIGTERM: the current run saves) and started again at any time: runs have fixed names, and a finished run is not trained
or evaluated again. If one model fails, the others still run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from efla_data.loader.token_file import TokenFile
from rich.console import Console
from rich.table import Table

from efla_lm.run.checkpoint import newest_checkpoint
from efla_lm.run.meta import read_meta
from efla_lm.run.verify import fault_in
from efla_lm.settings import TrainSettings, compose, entry
from efla_lm.settings.compose import CONFIG_DIR
from scripts.plan.forecast import Forecast, clock, forecast
from scripts.plan.settings import PlanSettings, ReproduceSettings
from scripts.study.launcher import python, run_until_stopped
from scripts.table1.__main__ import main as table1
from scripts.table1.table import read_paper

console = Console(highlight=False, width=140)


@dataclass(frozen=True)
class Job:
    """One run: its commands, how long it is, and how far it has come."""

    model: str
    run: Path
    train: list[str]  # overrides of train.py
    evaluate: list[str]  # overrides of eval.py
    steps: int
    batch_tokens: int

    @property
    def step(self) -> int:
        """Steps done, by the newest whole checkpoint."""
        saved = (self.run / "checkpoints").is_dir()
        newest = newest_checkpoint(self.run, lambda message: None, fault_in) if saved else None
        return read_meta(newest).step if newest else 0

    @property
    def is_trained(self) -> bool:
        return self.step >= self.steps and (self.run / "export" / "config.json").is_file()

    @property
    def is_evaluated(self) -> bool:
        """Whether a result of the finished model has all tasks, on as many documents as asked for."""
        wanted = next((int(text.removeprefix("limit=")) for text in self.evaluate if text.startswith("limit=")), None)
        for path in (self.run / "results").glob("paper-*.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            about = content["evaluation"]
            of_the_end = about["step"] == self.steps and about["settings"]["limit"] in (None, wanted)
            if of_the_end and not content["missing"]:
                return True
        return False

    @property
    def state(self) -> str:
        if not self.is_trained:
            return f"at step {step} of {self.steps}" if (step := self.step) else "to be trained"
        return "evaluated" if self.is_evaluated else "trained"


@entry("reproduce_table1", ReproduceSettings)
def main(settings: ReproduceSettings) -> int:
    """Train and evaluate all models of the paper's Table 1 at one size; restartable; prints the cost first."""
    jobs = list(plan_jobs(settings))
    print_cost(settings, jobs)
    if not settings.dry_run and not all(job.is_trained for job in jobs):
        check_tokens(jobs[0])
    failed: list[str] = []
    for job in jobs:
        for what, done, command in commands(settings, job):
            if done():
                continue
            console.print(f"\n$ {' '.join(command)}", style="bold cyan", soft_wrap=True, markup=False)
            if settings.dry_run:
                continue
            code, stopped = run_until_stopped(command)
            if stopped or (code == 0 and not done()):
                print("stopped: the same command continues from here", file=sys.stderr)
                return 1
            if code != 0:
                print(f"error: {what} of {job.run.name} ended with exit code {code}", file=sys.stderr)
                failed.append(f"{job.run.name} ({what})")
                break
    if settings.dry_run:
        return 0
    there = [job.run for job in jobs if job.run.is_dir()]
    code = table1.run([f"runs=[{','.join(map(str, there))}]", f"out={settings.out}"]) if there else 0
    if failed:
        print(f"error: failed: {', '.join(failed)}; the same command tries them again", file=sys.stderr)
    return 1 if failed else code


def plan_jobs(settings: ReproduceSettings) -> Iterator[Job]:
    """The runs in order: every model of the first seed, then of the next. Raises UserError for a recipe that does not
    compose or does not divide over the GPUs."""
    for seed in settings.seeds:
        for model in model_names(settings):
            run = Path(settings.runs_dir) / f"table1-{settings.size}-{model}-seed{seed}"
            data = [f"data.dir={settings.data_dir}"] if settings.data_dir else []
            train = [
                *recipe(settings.size), f"model={model}", f"seed={seed}", *data, *settings.train, f"name={run.name}",
                f"runs_dir={run.parent}",
            ]  # fmt: skip
            evaluate = [f"checkpoint={run}", "tasks=paper", *settings.eval]
            if settings.local_dir:
                evaluate.append(f"tasks.local_dir={settings.local_dir}")
            found = job_forecast(settings, train, 0)
            yield Job(model, run, train, evaluate, found.budget.steps, found.budget.batch_tokens)


def model_names(settings: ReproduceSettings) -> list[str]:
    """The models asked for, or those of the paper's table at this size (all four delta rules where it has none)."""
    if settings.models is not None:
        return settings.models
    _, rows = read_paper()
    return [family for size, family in rows if size == settings.size] or [
        "deltanet", "efla", "gated_deltanet", "gated_efla",
    ]  # fmt: skip


def recipe(size: str) -> list[str]:
    name = f"table1_{size}"
    return [f"experiment={name}"] if (CONFIG_DIR / "experiment" / f"{name}.yaml").is_file() else [f"size={size}"]


def job_forecast(settings: ReproduceSettings, train: list[str], done_tokens: int) -> Forecast:
    compose("train", train, TrainSettings)  # names a wrong key as train.py would
    plan = compose("plan", ["data=pydoc", *train] if train[0].startswith("size=") else train, PlanSettings)
    machine = {name: getattr(settings, name) for name in ("gpus", "gpu", "mfu", "efficiency")}
    return forecast(plan, done_tokens=done_tokens, **machine)


def check_tokens(job: Job) -> None:
    """Raise DataError where the token files of all runs are missing: one error instead of one for each model."""
    data = compose("train", job.train, TrainSettings).data
    for folder in data.mixture or [data.dir]:
        TokenFile.open(folder, "train")


def print_cost(settings: ReproduceSettings, jobs: list[Job]) -> None:
    """Time and GPU-hours of what is left, run by run. Evaluation takes minutes and is not counted."""
    table = Table(title=f"training on {settings.gpus} x {settings.gpu}", title_justify="left")
    for heading in ("run", "state", "tokens left", "tokens/s", "time", "GPU-hours", "GiB per device"):
        table.add_column(heading, justify="left" if heading in ("run", "state") else "right")
    seconds = hours = 0.0
    sources: set[str] = set()
    for job in jobs:
        done = job.step * job.batch_tokens
        found = job_forecast(settings, job.train, done)
        left = max(0, job.steps * job.batch_tokens - done)
        time = found.duration
        seconds, hours = seconds + time.seconds, hours + time.gpu_hours
        sources.add(found.speed.source)
        memory = f"{found.memory.peak_gib:.1f}" + ("" if found.fits else " (too much)")
        rate = f"{time.tokens_per_second:,.0f}"
        table.add_row(job.run.name, job.state, f"{left:,}", rate, clock(time.seconds), f"{time.gpu_hours:,.1f}", memory)
    console.print(table)
    price = "" if settings.price is None else f", {hours * settings.price:,.0f} at {settings.price:g} per GPU-hour"
    console.print(f"all together: {clock(seconds)}, {hours:,.1f} GPU-hours{price}")
    for source in sorted(sources):
        console.print(f"speed {source}", markup=False)


def commands(settings: ReproduceSettings, job: Job) -> list[tuple[str, Callable[[], bool], list[str]]]:
    """(name, whether it is done, command) of the two steps of a run."""
    start = python(settings.gpus)
    return [
        ("training", lambda: job.is_trained, [*start, "train.py", *job.train]),
        ("evaluation", lambda: job.is_evaluated, [*start, "eval.py", *job.evaluate]),
    ]


if __name__ == "__main__":
    main()
