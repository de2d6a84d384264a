"""Figure 3 from result files of MAD: scores per task and their average, the paper's beside; CSV, table, bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla_data.tasks.mad import BASELINES

from efla_lm.errors import UserError
from scripts.study.results import COLOURS, NAMES, markdown, mean_and_spread, new_figure, save_figure, write_csv

HEADINGS = {
    "compression": "Compress",
    "fuzzy_recall": "Fuzzy Recall",
    "in_context_recall": "In-Context Recall",
    "memorization": "Memorize",
    "noisy_recall": "Noisy Recall",
    "selective_copy": "Selective Copy",
}
PAPER = {  # percent [paper, section 5]; the averages are computed, as everywhere
    "deltanet": (42.7, 22.2, 99.9, 29.9, 99.9, 99.6),
    "efla": (43.8, 22.6, 100.0, 32.5, 100.0, 99.8),
}

Run = dict[str, Any]


def gather(contents: Sequence[dict[str, Any]]) -> list[Run]:
    """Runs of files with one budget; a run of a later file replaces an equal earlier one. Raises UserError."""
    for content in contents[1:]:
        if content["budget"] != contents[0]["budget"]:
            raise UserError(
                f"result files differ in their budget: {contents[0]['budget']} and {content['budget']}; "
                "report them apart"
            )
    keys = ("mixer", "task", "setting", "rate", "weight_decay", "seed")
    runs = {tuple(r[key] for key in keys): r for content in contents for r in content["runs"]}
    return list(runs.values())


def task_scores(runs: Sequence[Run], measure: str = "score") -> dict[str, dict[str, tuple[float, int]]]:
    """{mixer: {task: (mean over settings of the best member of the sweep, settings)}}.

    The best is chosen by the test score, as the benchmark does; with several seeds a member is its mean over them.
    """
    table: dict[str, dict[str, tuple[float, int]]] = {}
    for mixer in (m for m in NAMES if any(r["mixer"] == m for r in runs)):
        table[mixer] = {}
        for task in BASELINES:
            bests: dict[str, float] = {}
            members: dict[tuple[str, float, float], list[float]] = {}
            for run in runs:
                if run["mixer"] == mixer and run["task"] == task:
                    members.setdefault((run["setting"], run["rate"], run["weight_decay"]), []).append(run[measure])
            for (setting, _, _), values in members.items():
                bests[setting] = max(bests.get(setting, 0.0), mean_and_spread(values)[0])
            if bests:
                table[mixer][task] = (mean_and_spread(bests.values())[0], len(bests))
    return table


def write_report(contents: Sequence[dict[str, Any]], folder: Path, figures: bool) -> str:
    """Write mad.csv, mad.md and (if wanted) figure 3 into `folder`; return the table as Markdown."""
    runs = gather(contents)
    scores, plain = task_scores(runs), task_scores(runs, "accuracy")
    folder.mkdir(parents=True, exist_ok=True)
    columns = ("mixer", "task", "setting", "rate", "weight_decay", "seed", "score", "accuracy", "seconds")
    write_csv(folder / "mad.csv", columns, ([run[c] for c in columns] for run in runs))
    text = _summary(contents[0], scores, plain)
    (folder / "mad.md").write_text(text, encoding="utf-8")
    if figures:
        _figure3(scores, folder / "mad-figure3")
    return text


def _summary(content: dict[str, Any], scores: dict, plain: dict) -> str:
    budget = content["budget"]
    rows = []
    for mixer, tasks in scores.items():
        rows.append([NAMES[mixer], *_cells([tasks.get(task, (None,))[0] for task in BASELINES])])
        rows.append([f"{NAMES[mixer]}, plain accuracy", *_cells([plain[mixer].get(t, (None,))[0] for t in BASELINES])])
        if mixer in PAPER:
            rows.append([f"{NAMES[mixer]}, paper", *_cells([value / 100 for value in PAPER[mixer]])])
    settings = max((count for tasks in scores.values() for _, count in tasks.values()), default=0)
    full = budget["epochs"] == 200 and budget["batch"] == 128 and budget["settings"] == "all"
    return (
        f"MAD, sweep `{content['sweep']}`: {budget['settings']} settings per task (up to {settings}), "
        f"{budget['epochs']} epochs of batch {budget['batch']}, {budget['precision']}, "
        f"rates {budget['rates']}, weight decays {budget['weight_decays']}, seeds {budget['seeds']}."
        f"{'' if full else ' Reduced: the protocol has all settings and 200 epochs of batch 128.'}\n\n"
        "Percent. The score is the accuracy per class, averaged over classes, as the benchmark counts; "
        "averages are computed from the row.\n\n"
    ) + markdown(["model", *HEADINGS.values(), "average"], rows)


def _cells(values: Sequence[float | None]) -> list[str]:
    present = [v for v in values if v is not None]
    average = f"{100 * mean_and_spread(present)[0]:.1f}" if len(present) == len(values) else "missing"
    return ["missing" if v is None else f"{100 * v:.1f}" for v in values] + [average]


def _figure3(scores: dict[str, dict[str, tuple[float, int]]], path: Path) -> None:
    figure, axes = new_figure(1, 1, width=9, height=3.2)
    axis, width = axes[0][0], 0.8 / max(len(scores), 1)
    for n, (mixer, tasks) in enumerate(scores.items()):
        values = [100 * tasks[t][0] if t in tasks else 0.0 for t in BASELINES]
        if len(tasks) == len(BASELINES):
            values.append(mean_and_spread(values)[0])
        places = [x + (n - (len(scores) - 1) / 2) * width for x in range(len(values))]
        axis.bar(places, values, width, color=COLOURS[mixer], label=NAMES[mixer])
        if mixer in PAPER:
            paper = [*PAPER[mixer], mean_and_spread(PAPER[mixer])[0]][: len(values)]
            label = "paper" if mixer == "efla" else None
            axis.scatter(places, paper, marker="_", s=120, color="black", label=label, zorder=3)
    axis.set_xticks(range(len(HEADINGS) + 1), [*HEADINGS.values(), "average"], fontsize=8)
    axis.set(ylabel="score, percent", ylim=(0, 105))
    axis.legend(fontsize=8)
    save_figure(figure, path)
