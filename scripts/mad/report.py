"""Figure 3 from result files of MAD: scores per task and their average beside the paper's; CSV, table, bar chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efla_data.tasks.mad import BASELINES

from efla_lm.errors import UserError
from scripts.study.plot import colour, in_order, label, new_figure, save_figure
from scripts.study.table import MISSING, markdown, mean_and_spread, write_csv

HEADINGS = {
    "compression": "Compress", "fuzzy_recall": "Fuzzy Recall", "in_context_recall": "In-Context Recall",
    "memorization": "Memorize", "noisy_recall": "Noisy Recall", "selective_copy": "Selective Copy",
}  # fmt: skip
PAPER = {  # percent [paper, section 5]; averages are computed from the row
    "deltanet": (42.7, 22.2, 99.9, 29.9, 99.9, 99.6),
    "efla": (43.8, 22.6, 100.0, 32.5, 100.0, 99.8),
}
COLUMNS = ("mixer", "task", "setting", "rate", "weight_decay", "seed", "score", "accuracy", "seconds")

Run = dict[str, Any]
Scores = dict[str, dict[str, tuple[float, int]]]


def gather(contents: Sequence[dict[str, Any]]) -> list[Run]:
    """Runs of files with one budget; a run of a later file replaces an equal earlier one. Raises UserError."""
    for content in contents[1:]:
        if content["budget"] != contents[0]["budget"]:
            raise UserError(
                f"result files differ in their budget: {contents[0]['budget']} and {content['budget']}; "
                "report them apart"
            )
    runs = {tuple(run[key] for key in COLUMNS[:6]): run for content in contents for run in content["runs"]}
    return list(runs.values())


def task_scores(runs: Sequence[Run], measure: str = "score") -> Scores:
    """{mixer: {task: (mean over settings of the best member of the sweep, settings)}}.

    The best is chosen by the test score, as the benchmark does; with several seeds a member is its mean over them.
    """
    members: dict[tuple[str, ...], dict[tuple[str, float], list[float]]] = {}
    for run in runs:
        place = members.setdefault((run["mixer"], run["task"], run["setting"]), {})
        place.setdefault((run["rate"], run["weight_decay"]), []).append(run[measure])
    table: Scores = {mixer: {} for mixer in in_order(run["mixer"] for run in runs)}
    for mixer, tasks in table.items():
        for task in BASELINES:
            bests = [
                max(mean_and_spread(values)[0] for values in found.values())
                for place, found in members.items()
                if place[:2] == (mixer, task)
            ]
            if bests:
                tasks[task] = (mean_and_spread(bests)[0], len(bests))
    return table


def is_protocol(budget: dict[str, Any]) -> bool:
    """Whether a budget is the benchmark's: only then can scores be compared with the paper's."""
    return budget["epochs"] == 200 and budget["batch"] == 128 and budget["settings"] == "all"


def write_report(contents: Sequence[dict[str, Any]], folder: Path, figures: bool) -> str:
    """Write mad.csv, mad.md and (if wanted) figure 3 into `folder`; return the table as Markdown."""
    runs = gather(contents)
    scores, budget = task_scores(runs), contents[0]["budget"]
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "mad.csv", COLUMNS, ([run[c] for c in COLUMNS] for run in runs))
    text = _summary(contents[0], scores, task_scores(runs, "accuracy"))
    (folder / "mad.md").write_text(text, encoding="utf-8")
    if figures:
        title = f"MAD, {budget['settings']} settings, {budget['epochs']} epochs"
        _figure3(scores, title, folder / "mad-figure3", with_paper=is_protocol(budget))
    return text


def _summary(content: dict[str, Any], scores: Scores, plain: Scores) -> str:
    budget = content["budget"]
    rows = []
    for mixer, tasks in scores.items():
        rows.append([label(mixer), *_cells([tasks.get(task, (None,))[0] for task in BASELINES])])
        rows.append([f"{label(mixer)}, plain accuracy", *_cells([plain[mixer].get(t, (None,))[0] for t in BASELINES])])
        if mixer in PAPER:
            rows.append([f"{label(mixer)}, paper", *_cells([value / 100 for value in PAPER[mixer]])])
    settings = max((count for tasks in scores.values() for _, count in tasks.values()), default=0)
    reduced = "" if is_protocol(budget) else " Reduced: the protocol has all settings and 200 epochs of batch 128."
    return (
        f"MAD, sweep `{content['sweep']}`: {budget['settings']} settings per task (up to {settings}), "
        f"{budget['epochs']} epochs of batch {budget['batch']}, {budget['precision']}, "
        f"rates {budget['rates']}, weight decays {budget['weight_decays']}, seeds {budget['seeds']}.{reduced}\n\n"
        "Percent. The score is the accuracy per class, averaged over classes, as the benchmark counts; "
        "averages are computed from the row.\n\n"
    ) + markdown(["model", *HEADINGS.values(), "average"], rows)


def _cells(values: Sequence[float | None]) -> list[str]:
    present = [v for v in values if v is not None]
    average = f"{100 * mean_and_spread(present)[0]:.1f}" if len(present) == len(values) else MISSING
    return [MISSING if v is None else f"{100 * v:.1f}" for v in values] + [average]


def _figure3(scores: Scores, title: str, path: Path, with_paper: bool) -> None:
    """Bars by task and mixer. The paper's values are marks, drawn only where they are of the same budget."""
    figure, axes = new_figure(1, 1, width=9, height=3.2)
    axis, width = axes[0][0], 0.8 / max(len(scores), 1)
    for n, (mixer, tasks) in enumerate(scores.items()):
        values = [100 * tasks[t][0] if t in tasks else 0.0 for t in BASELINES]
        if len(tasks) == len(BASELINES):
            values.append(mean_and_spread(values)[0])
        places = [x + (n - (len(scores) - 1) / 2) * width for x in range(len(values))]
        axis.bar(places, values, width, color=colour(mixer), label=label(mixer))
        if with_paper and mixer in PAPER:
            paper = [*PAPER[mixer], mean_and_spread(PAPER[mixer])[0]][: len(values)]
            text = "paper" if mixer == "efla" else None
            axis.scatter(places, paper, marker="_", s=120, color="black", label=text, zorder=3)
    axis.set_xticks(range(len(HEADINGS) + 1), [*HEADINGS.values(), "average"], fontsize=8)
    axis.set(ylabel="score, percent", ylim=(0, 105))
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=8)
    save_figure(figure, path)
