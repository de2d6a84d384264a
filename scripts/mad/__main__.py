"""The MAD suite, the paper's Figure 3: `python -m scripts.mad sweep=protocol`.

    sweep=protocol   every setting of every task, three rates x two weight decays, 200 epochs (days of one GPU)
    sweep=baseline   the first setting of every task, the same six members, 40 epochs: minutes of one GPU per mixer
    sweep=reduced    the first setting with 800 examples, one member, 2 epochs of small batches: minutes on a CPU;
                     shows that everything runs, not what a mixer can do
    replot=[a.json]  table and figure again from result files, several of one budget together in one JSON

The members of a sweep are trained as one stack. A stopped command continues with the next mixer and setting.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from efla_data.tasks.mad import BASELINES, settings_of

from efla_lm.devices import choose_device
from efla_lm.settings import PATH, entry, key
from scripts.mad.report import gather, write_report
from scripts.mad.training import Budget, Member, train_and_score
from scripts.stacked.rules import RECURRENT_MIXERS
from scripts.study import result_file
from scripts.study.checks import expect_above_zero, expect_at_least, expect_backend, expect_from
from scripts.study.progress import ProgressLine

KEY = ("mixer", "task", "setting", "rate", "weight_decay", "seed")


@dataclass
class MadSettings:
    """All of `python -m scripts.mad`."""

    name: str = key("protocol", "label of the sweep in results")
    mixers: list[str] = key(["deltanet", "efla"], f"among {', '.join(RECURRENT_MIXERS)}")
    tasks: list[str] = key(list(BASELINES), "tasks, in the order of the table")
    settings: str = key("all", "levels of difficulty: all, or the baseline alone", choices=("all", "baseline"))
    rates: list[float] = key([1e-4, 5e-4, 1e-3], "learning rates [MAD protocol]")
    weight_decays: list[float] = key([0.0, 0.1], "weight decays [MAD protocol]")
    seeds: list[int] = key([0], "seeds of initial weights")
    epochs: int = key(200, "passes over the training examples [MAD protocol]")
    batch: int = key(128, "examples per step [MAD protocol]")
    examples: int | None = key(None, "at most this many training examples; null: as the setting says")
    test_examples: int = key(1280, "examples of the test set [MAD protocol]")
    precision: str = key("fp32", "bf16 is the benchmark's own", choices=("fp32", "bf16"))
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    backend: str = key("auto", "implementation of the ops", choices=("auto", "torch", "reference", "triton", "fla"))
    figures: bool = key(True, "draw the figure, not only JSON, CSV and table")
    out: str = key("results/mad", "folder of what is written", path=PATH)
    replot: list[str] = key([], "result files to report on, instead of training")

    def validate(self) -> None:
        """Raise UserError for values that no experiment can use."""
        expect_from(self, mixers=RECURRENT_MIXERS, tasks=tuple(BASELINES))
        expect_above_zero(self, "rates")
        expect_at_least(self, 0, "weight_decays", "seeds")
        expect_at_least(self, 1, "epochs", "batch", "examples", "test_examples")


@entry("mad", MadSettings)
def main(settings: MadSettings) -> None:
    """Train and score small models on the six MAD tasks; write JSON, CSV, table and figure."""
    folder = Path(settings.out)
    if settings.replot:
        contents = [result_file.read(path, experiment="mad") for path in settings.replot]
        print(write_report(contents, folder, settings.figures))
        result_file.write(folder / "mad.json", result_file.merge(contents, gather(contents)))
        print(f"written to {folder}")
        return
    device = choose_device(settings.device)
    expect_backend(settings.backend, device)
    budget = Budget(settings.epochs, settings.batch, settings.precision, settings.test_examples)
    sweep = {name: getattr(settings, name) for name in ("settings", "examples", "rates", "weight_decays", "seeds")}
    members = [
        Member(rate, decay, seed)
        for rate in settings.rates
        for decay in settings.weight_decays
        for seed in settings.seeds
    ]
    head = {
        "experiment": "mad",
        "sweep": settings.name,
        "budget": asdict(budget) | sweep,
        "environment": result_file.environment(device),
        "command": result_file.command_line("mad", settings),
        "settings": result_file.portable(settings, without=("mixers", "tasks", "figures", "replot")),
    }
    result = result_file.ResultFile(folder / "mad.json", head, KEY, rows="runs")
    parts = {
        f"{mixer}, {task} ({setting.label})": (mixer, task, setting)
        for task in settings.tasks
        for setting in settings_of(task)[: None if settings.settings == "all" else 1]
        for mixer in settings.mixers
    }
    for part in result.missing(list(parts)):
        mixer, task, setting = parts[part]
        if settings.examples is not None:
            setting = replace(setting, train_examples=min(setting.train_examples, settings.examples))
        line, start = ProgressLine(part), time.perf_counter()
        scores = train_and_score(mixer, setting, members, budget, device, settings.backend, line.step)
        seconds = round(time.perf_counter() - start, 2)
        line.end(f"best of {len(members)}: {100 * max(s['score'] for s in scores):.1f} in {seconds:.1f} s")
        for member, score in zip(members, scores):
            about = {"mixer": mixer, "task": task, "setting": setting.label}
            result.add({**about, **asdict(member), **score, "seconds": seconds})
    print(write_report([result.content], folder, settings.figures))
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
