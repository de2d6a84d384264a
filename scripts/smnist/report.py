"""Figures 1 and 2, the table of half-accuracy points and a CSV from result files of sequential MNIST."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.models.rules import RULES
from scripts.study.plot import colour, in_order, label, new_figure, save_figure
from scripts.study.table import markdown, mean_and_spread, mean_text, percent_text, write_csv

SCRIPT_RATES = {"deltanet": 1e-3, "efla": 3e-3}  # of the authors' public script [paper, section 4]
DEFAULT_SCRIPT_RATE = 1e-3  # for mixers that the script does not have
AXES = {
    "dropout": "pixel dropout, probability",
    "intensity": "intensity, factor",
    "noise": "Gaussian noise, standard deviation",
}

Run = dict[str, Any]


def script_rate(mixer: str) -> float:
    """The rate at which the `paper` setting compares a mixer."""
    return SCRIPT_RATES.get(mixer, DEFAULT_SCRIPT_RATE)


def gather(contents: Sequence[dict[str, Any]]) -> tuple[str, list[Run]]:
    """(setting, runs) of result files that belong together; a run of a later file replaces an equal earlier one.

    Raises:
        UserError: the files are of different settings, images or budgets.
    """
    first = contents[0]
    for content in contents[1:]:
        for key in ("setting", "images", "plan"):
            if content[key] != first[key]:
                raise UserError(f"result files differ in {key}: {first[key]} and {content[key]}; report them apart")
    runs = {(r["mixer"], r["rate"], r["seed"]): r for content in contents for r in content["runs"]}
    return first["setting"], [runs[key] for key in sorted(runs)]


def compared_rates(setting: str, runs: Sequence[Run]) -> dict[str, float]:
    """The rate at which each mixer enters Figure 1: the script's, or the best by mean validation accuracy."""
    if setting == "paper":
        return {mixer: script_rate(mixer) for mixer in mixers_of(runs)}
    rates: dict[str, float] = {}
    for mixer in mixers_of(runs):
        scores: dict[float, list[float]] = {}
        for run in (r for r in runs if r["mixer"] == mixer):
            scores.setdefault(run["rate"], []).append(run["validation_accuracy"])
        rates[mixer] = max(scores, key=lambda rate: mean_and_spread(scores[rate])[0])
    return rates


def mixers_of(runs: Sequence[Run]) -> list[str]:
    """Mixers that have runs, in the order of all tables."""
    return in_order(run["mixer"] for run in runs)


def rates_of(runs: Sequence[Run]) -> list[float]:
    """Learning rates that have runs."""
    return sorted({run["rate"] for run in runs})


def at(runs: Sequence[Run], mixer: str, rate: float) -> list[Run]:
    """The seeds of one mixer at one rate."""
    return [r for r in runs if r["mixer"] == mixer and r["rate"] == rate]


def half_point(levels: Sequence[float], accuracy: Sequence[float]) -> float | None:
    """The level at which accuracy first falls to half of what it is at levels[0], between levels by a straight line.

    None where it never does.
    """
    half = accuracy[0] / 2
    for n in range(1, len(levels)):
        if accuracy[n] <= half < accuracy[n - 1]:
            part = (accuracy[n - 1] - half) / (accuracy[n - 1] - accuracy[n])
            return levels[n - 1] + part * (levels[n] - levels[n - 1])
    return None


def write_report(contents: Sequence[dict[str, Any]], folder: Path, figures: bool) -> str:
    """Write CSV, table and (if wanted) figures into `folder`; return the table as Markdown."""
    setting, runs = gather(contents)
    rates = compared_rates(setting, runs)
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / f"{setting}.csv", ["mixer", "rate", "seed", "measure", "level", "accuracy"], _long_rows(runs))
    text = _summary(setting, contents[0], runs, rates)
    (folder / f"{setting}.md").write_text(text, encoding="utf-8")
    if figures:
        _figure1(setting, runs, rates, folder / f"{setting}-figure1")
        _figure2(runs, folder / f"{setting}-figure2")
        if setting == "strict":
            _figure_equal_rates(runs, folder / "strict-equal-rates")
    return text


def _long_rows(runs: Sequence[Run]) -> list[list[Any]]:
    rows = []
    for run in runs:
        head = [run["mixer"], run["rate"], run["seed"]]
        rows.append([*head, "test", "", run["test_accuracy"]])
        if run["validation_accuracy"] is not None:
            rows.append([*head, "validation", "", run["validation_accuracy"]])
        for kind, curve in (run["corruptions"] or {}).items():
            rows += [[*head, kind, level, acc] for level, acc in zip(curve["level"], curve["accuracy"])]
    return rows


def _summary(setting: str, content: dict[str, Any], runs: Sequence[Run], rates: dict[str, float]) -> str:
    images = content["images"]
    note = "" if images["tokens"] == 784 else f" Images pooled to {images['tokens']} tokens: not the paper's setting."
    chosen = "the public script's" if setting == "paper" else "best on the validation split"
    text = (
        f"Sequential MNIST, setting `{setting}`: {images['train']:,} training images ({images['source']}), "
        f"{content['plan']['steps']} steps of {content['plan']['batch']}; learning rates {chosen}.{note}"
    )
    rows = []
    for mixer, rate in rates.items():
        if own := at(runs, mixer, rate):
            clean = percent_text([r["test_accuracy"] for r in own])
            rows.append([label(mixer), f"{rate:g}", len(own), clean, *(_half_points(own, kind) for kind in AXES)])
    header = ["model", "rate", "seeds", "clean test accuracy", *(f"half lost at {kind}" for kind in AXES)]
    parts = [text, markdown(header, rows)]
    rows = [
        [f"{rate:g}", *(percent_text([r["test_accuracy"] for r in at(runs, m, rate)]) for m in mixers_of(runs))]
        for rate in rates_of(runs)
    ]
    parts.append(markdown(["rate", *(f"{label(m)}, clean" for m in mixers_of(runs))], rows))
    if setting == "strict":
        rows = []
        for rate in rates_of(runs):
            for mixer in mixers_of(runs):
                if own := [r for r in at(runs, mixer, rate) if r["corruptions"]]:
                    areas = (percent_text([_mean_of(r, kind) for r in own]) for kind in AXES)
                    rows.append([f"{rate:g}", label(mixer), *(_half_points(own, kind) for kind in AXES), *areas])
        if rows:
            header = ["rate", "model", *(f"half lost at {kind}" for kind in AXES), *(f"mean over {k}" for k in AXES)]
            parts.append("At equal rates; the mean accuracy over all levels is the area under the curve.")
            parts.append(markdown(header, rows))
        parts += _pairs(runs)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _pairs(runs: Sequence[Run]) -> list[str]:
    """Of two mixers trained alike (rate, seed, hence starting values and order of images): how often one is above."""
    rows = []
    for exact, euler in ((name, rule.euler) for name, rule in RULES.items() if rule.euler):
        others = {(r["rate"], r["seed"]): r for r in runs if r["mixer"] == euler and r["corruptions"]}
        own = [r for r in runs if r["mixer"] == exact and r["corruptions"] and (r["rate"], r["seed"]) in others]
        for measure in ("clean", *AXES) if own else ():
            gains = [100 * (_mean_of(r, measure) - _mean_of(others[r["rate"], r["seed"]], measure)) for r in own]
            above = f"{sum(gain > 0 for gain in gains)} of {len(gains)}"
            rows.append([f"{label(exact)} above {label(euler)}", measure, above, mean_text(gains, sign=True)])
    header = ["pairs of equal rate and seed", "accuracy", "pairs", "difference in points"]
    text = "Pair by pair; under a corruption, the mean accuracy over all levels."
    return [text, markdown(header, rows)] if rows else []


def _mean_of(run: Run, measure: str) -> float:
    """Clean test accuracy, or the mean over the levels of a corruption."""
    if measure == "clean":
        return float(run["test_accuracy"])
    return mean_and_spread(run["corruptions"][measure]["accuracy"])[0]


def _half_points(own: Sequence[Run], kind: str) -> str:
    """Mean half-accuracy point of the seeds that lose half, and how many never do."""
    curves = [r["corruptions"][kind] for r in own if r["corruptions"]]
    points = [half_point(curve["level"], curve["accuracy"]) for curve in curves]
    reached = [p for p in points if p is not None]
    if points and not reached:
        return f"never (to {curves[0]['level'][-1]:g})"
    never = len(points) - len(reached)
    return mean_text(reached) + (f" ({never} of {len(points)} never)" if never else "")


def _draw(axis: Any, runs: Sequence[Run], mixer: str, kind: str, text: str) -> None:
    curves = [r["corruptions"][kind] for r in runs if r["corruptions"]]
    if curves:
        levels = curves[0]["level"]
        points = [mean_and_spread(c["accuracy"][n] for c in curves) for n in range(len(levels))]
        axis.plot(levels, [m for m, _ in points], color=colour(mixer), marker="o", markersize=3, label=text)
        low, high = zip(*((m - s, m + s) for m, s in points))
        axis.fill_between(levels, low, high, color=colour(mixer), alpha=0.2, linewidth=0)


def _figure1(setting: str, runs: Sequence[Run], rates: dict[str, float], path: Path) -> None:
    figure, axes = new_figure(1, 3)
    for axis, kind in zip(axes[0], AXES):
        for mixer, rate in rates.items():
            _draw(axis, at(runs, mixer, rate), mixer, kind, f"{label(mixer)}, lr {rate:g}")
        axis.set(xlabel=AXES[kind], ylabel="test accuracy", ylim=(0, 1))
    axes[0][0].legend(fontsize=8)
    figure.suptitle(f"sMNIST under corruption, setting {setting}; mean and spread over seeds", fontsize=9)
    save_figure(figure, path)


def _figure2(runs: Sequence[Run], path: Path) -> None:
    rates = rates_of(runs)
    figure, axes = new_figure(2, len(rates), width=2.6)
    for column, rate in enumerate(rates):
        for mixer in mixers_of(runs):
            for number, run in enumerate(at(runs, mixer, rate)):
                text, curve = label(mixer) if number == 0 else None, run["train"]
                for axis, name in zip(axes[:, column], ("loss", "accuracy")):
                    axis.plot(curve["step"], curve[name], color=colour(mixer), lw=1, alpha=0.8, label=text)
        axes[0][column].set(title=f"lr {rate:g}", ylabel="training loss" if column == 0 else None, ylim=(0, 2.5))
        axes[1][column].set(xlabel="step", ylabel="training accuracy" if column == 0 else None, ylim=(0, 1))
    axes[0][0].legend(fontsize=8)
    save_figure(figure, path)


def _figure_equal_rates(runs: Sequence[Run], path: Path) -> None:
    rates = rates_of(runs)
    figure, axes = new_figure(len(rates), 3)
    for row, rate in zip(axes, rates):
        for axis, kind in zip(row, AXES):
            for mixer in mixers_of(runs):
                _draw(axis, at(runs, mixer, rate), mixer, kind, label(mixer))
            axis.set(xlabel=AXES[kind], ylabel=f"accuracy, lr {rate:g}", ylim=(0, 1))
    axes[0][0].legend(fontsize=8)
    save_figure(figure, path)
