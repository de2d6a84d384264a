"""The MAD suite, the paper's Figure 3: `python -m scripts.mad sweep=protocol`.

    sweep=protocol   every setting of every task, three rates x two weight decays, 200 epochs (days of one GPU)
    sweep=baseline   the first setting of every task, the same six members, 40 epochs: minutes of one GPU per mixer
    sweep=reduced    the first setting with 800 examples, one member, 2 epochs of small batches: minutes on a CPU;
                     shows that everything runs, not what a mixer can do
    replot=[a.json]  table and figure again from result files, several of one budget together in one JSON

The members of a sweep are trained as one stack.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from efla_data.tasks.mad import BASELINES, settings_of

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.settings import PATH, check_output, entry, key
from scripts.mad.report import gather, write_report
from scripts.mad.training import Budget, Member, train_and_score
from scripts.study.experiment_checks import check_backend, check_rates
from scripts.study.progress import Line
from scripts.study.results import environment, merge, read_json, write_json
from scripts.study.rules import RECURRENT_MIXERS


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
        """Raise UserError for values that no experiment can mean."""
        for name, allowed in (("mixers", RECURRENT_MIXERS), ("tasks", tuple(BASELINES))):
            for value in getattr(self, name):
                if value not in allowed:
                    raise UserError(f"{name}: got {value!r}, expected some of {', '.join(allowed)}")
        for name in ("mixers", "tasks", "rates", "weight_decays", "seeds"):
            if not getattr(self, name):
                raise UserError(f"{name}: expected at least one")
        for name in ("epochs", "batch", "examples", "test_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}: got {value}, expected 1 or more")
        check_rates(self.rates)
        for decay in self.weight_decays:
            if decay < 0:
                raise UserError(f"weight_decays: got {decay}, expected 0 or more")


@entry("mad", MadSettings)
def main(settings: MadSettings) -> None:
    """Train and score small models on the six MAD tasks; write JSON, CSV, table and figure."""
    folder = Path(settings.out)
    if settings.replot:
        contents = read_json(settings.replot, "mad")
        print(write_report(contents, folder, settings.figures))
        write_json(folder / "mad.json", merge(contents, gather(contents)))
        print(f"written to {folder}")
        return
    device = choose_device(settings.device)
    check_backend(settings.backend, device)
    path = folder / "mad.json"
    check_output(path)
    budget = Budget(settings.epochs, settings.batch, settings.precision, settings.test_examples)
    members = [
        Member(rate, decay, seed)
        for rate in settings.rates
        for decay in settings.weight_decays
        for seed in settings.seeds
    ]
    content: dict = {
        "experiment": "mad",
        "sweep": settings.name,
        "budget": asdict(budget)
        | {
            "settings": settings.settings,
            "examples": settings.examples,
            "rates": list(settings.rates),
            "weight_decays": list(settings.weight_decays),
            "seeds": list(settings.seeds),
        },
        "environment": environment(device),
        "runs": [],
    }
    for task in settings.tasks:
        for setting in settings_of(task)[: None if settings.settings == "all" else 1]:
            if settings.examples is not None:
                setting = replace(setting, train_examples=min(setting.train_examples, settings.examples))
            for mixer in settings.mixers:
                line = Line(f"{mixer}, {task} ({setting.label})")
                start = time.perf_counter()
                results = train_and_score(mixer, setting, members, budget, device, settings.backend, line)
                seconds = round(time.perf_counter() - start, 2)
                best = max(result["score"] for result in results)
                line.end(f"best of {len(members)}: {100 * best:.1f} in {seconds:.1f} s")
                content["runs"] += [
                    {"mixer": mixer, "task": task, "setting": setting.label, **asdict(member), **result}
                    | {"seconds": seconds}
                    for member, result in zip(members, results)
                ]
                write_json(path, content)  # what is done stays, should the next one fail
    print(write_report([content], folder, settings.figures))
    print(f"written to {folder}")


if __name__ == "__main__":
    main()
