"""Tables and figures of the study, made from its result file alone."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from efla_lm.models import RULES
from scripts.lm_study.analysis import CORNERS, Estimate, Losses, Study, effects, estimate, paired
from scripts.study.plot import new_figure, save_figure
from scripts.study.table import markdown

ROWS = {rule.option: rule for rule in RULES.values()}  # of the table of models, by the names of arms: model=NAME
LEGEND = """\
Held-out loss in nats per token, lower is better. A difference is paired: both runs have the same seed, hence the same
starting values and batches. ± is the half width of the 95 % interval (Student's t over seeds); * marks an interval
without 0. A rate is chosen on the same held-out text, by the seeds that met every rate, with as many trials for each
arm; a best loss is therefore optimistic, by about as much for every arm.
"""


def write_report(content: dict[str, Any], folder: Path, figures: bool) -> str:
    """Write `lm_study.md` and the figures into `folder`; returns the text."""
    study = Study.of(content)
    plan = content["plan"]
    size = next((run["parameters"] for run in content["runs"] if run.get("parameters")), None)
    lines = [
        f"# {plan['name']}: {plan['size']}"
        f"{'' if size is None else f' ({size:,} parameters)'}, {plan['tokens']:,} tokens a run, "
        f"batches of {plan['batch_tokens']:,}, context {plan['context']:,}\n",
        *(f"**Note:** {text}.\n" for text in study.warnings()),
        LEGEND,
        _best(study, content),
        _rates(study),
        _differences(study),
        _effects(study),
        _runs(content),
    ]
    text = "\n".join(line for line in lines if line)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lm_study.md").write_text(text, encoding="utf-8")
    if figures and study.losses:
        _curve(study, folder / "lm_study-rates")
        _training(study, content, folder / "lm_study-training")
    return text


def _label(arm: str) -> str:
    return ROWS[arm].label


def _mean(losses: Losses) -> str:
    """Mean and standard deviation over seeds."""
    finite = [loss for loss in losses.values() if math.isfinite(loss)]
    away = len(losses) - len(finite)
    if not finite:
        return "diverged" if losses else "-"
    spread = f" ± {statistics.stdev(finite):.4f}" if len(finite) > 1 else ""
    return f"{statistics.fmean(finite):.4f}{spread} ({len(finite)})" + (f", {away} diverged" if away else "")


def _against(study: Study, arm: str, rate: float | None, base_rate: float | None) -> str:
    """The paired difference of an arm from the baseline."""
    if rate is None or base_rate is None or arm == study.arms[0]:
        return "-"
    differences = paired(study.at(arm, rate), study.at(study.arms[0], base_rate))
    return str(estimate(differences)) if differences else "-"


def _best(study: Study, content: dict[str, Any]) -> str:
    base = study.best_rate(study.arms[0])
    rows = []
    for arm in study.arms:
        best = study.best_rate(arm)
        speeds = [run["tokens_per_second"] for run in content["runs"] if run["arm"] == arm and run["tokens_per_second"]]
        rows.append([
            _label(arm), "-" if best is None else f"{best:g}",
            "-" if best is None else _mean(study.at(arm, best)),
            _against(study, arm, best, base), f"{statistics.median(speeds):,.0f}" if speeds else "-",
        ])  # fmt: skip
    header = [
        "arm",
        "best rate",
        "held-out loss, mean ± sd (seeds)",
        f"minus {_label(study.arms[0])}",
        "tokens/s of a run",
    ]
    return "## Every arm at its own best rate\n\n" + markdown(header, rows)


def _rates(study: Study) -> str:
    rows = [[_label(arm), *(_mean(study.at(arm, rate)) for rate in study.rates)] for arm in study.arms]
    return "## Loss against rate\n\n" + markdown(["arm", *(f"{rate:g}" for rate in study.rates)], rows)


def _differences(study: Study) -> str:
    rates = study.compared_rates()
    if not rates:
        return ""
    rows = [[_label(arm), *(_against(study, arm, rate, rate) for rate in rates)] for arm in study.arms[1:]]
    header = [f"minus {_label(study.arms[0])}", *(f"{rate:g}" for rate in rates)]
    return "## At equal rates\n\n" + markdown(header, rows)


def _effects(study: Study) -> str:
    """The factorial's table; empty unless all four corners are arms."""
    if not set(CORNERS) <= set(study.arms):
        return ""

    def at(rates: dict[str, float | None]) -> dict[str, Estimate]:
        losses = {arm: {} if rate is None else study.at(arm, rate) for arm, rate in rates.items()}
        return effects(losses)

    found = [("each at its best rate", at({arm: study.best_rate(arm) for arm in CORNERS}))]
    found += [(f"{rate:g}", at(dict.fromkeys(CORNERS, rate))) for rate in study.compared_rates()]
    rows = [[label, *(str(e[name]) for name in ("gate", "values", "interaction"))] for label, e in found if e]
    header = ["rate", "saturating gate", "values over \\|k\\|", "interaction"]
    return "## What the gate and the values' scale each change\n\n" + markdown(header, rows) if rows else ""


def _runs(content: dict[str, Any]) -> str:
    runs = content["runs"]
    minutes = sum(run["seconds"] / run["parallel_runs"] for run in runs) / 60
    states = ", ".join(f"{sum(r['state'] == s for r in runs)} {s}" for s in ("done", "diverged", "stopped", "failed"))
    places = sorted({f"{r['environment']['device']}, commit {str(r['environment']['commit'])[:7]}" for r in runs})
    at_once = max((run["parallel_runs"] for run in runs), default=1)
    shared = f" Up to {at_once} runs shared a device and its speed." if at_once > 1 else ""
    return f"{len(runs)} runs ({states}), {minutes:.1f} device minutes: {'; '.join(places)}.{shared}\n"


def _curve(study: Study, path: Path) -> None:
    """Held-out loss against rate: the mean over the sweep's seeds, and every run as a point."""
    figure, axes = new_figure(1, 1, width=5.0, height=3.6)
    axis = axes[0][0]
    for arm in study.arms:
        points = [(r, loss) for r in study.rates for loss in study.at(arm, r).values() if math.isfinite(loss)]
        axis.scatter(*zip(*points), color=ROWS[arm].colour, s=10, alpha=0.6) if points else None
        rates = [r for r in study.compared_rates() if math.isfinite(study.sweep_loss(arm, r))]
        axis.plot(rates, [study.sweep_loss(arm, r) for r in rates], color=ROWS[arm].colour, lw=1.4, label=_label(arm))
    axis.set(xscale="log", xlabel="peak learning rate", ylabel="held-out loss, nats per token")
    axis.legend(fontsize=8)
    save_figure(figure, path)


def _training(study: Study, content: dict[str, Any], path: Path) -> None:
    """Held-out loss along training: each arm at its best rate, a line for each seed."""
    figure, axes = new_figure(1, 1, width=5.0, height=3.6)
    axis = axes[0][0]
    for arm in study.arms:
        runs = [r for r in content["runs"] if r["arm"] == arm and r["rate"] == study.best_rate(arm)]
        for number, run in enumerate(r for r in runs if r["state"] == "done"):
            tokens, losses = zip(*run["validations"])
            label = _label(arm) if number == 0 else None
            axis.plot(
                [t / 1e6 for t in tokens], losses, "o-", ms=3, color=ROWS[arm].colour, lw=1, alpha=0.8, label=label
            )
    axis.set(xlabel="million tokens", ylabel="held-out loss, nats per token")
    if axis.lines:
        axis.legend(fontsize=8)
    save_figure(figure, path)
