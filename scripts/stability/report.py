"""Table and figure of the discretisation error, from its result file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.stability.discretisation import EDGES
from scripts.study.plot import label, new_figure, save_figure
from scripts.study.table import markdown


def write_report(content: dict[str, Any], folder: Path, figures: bool) -> str:
    """Write stability.md and (if wanted) the figure into `folder`; return the table as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = _summary(content)
    (folder / "stability.md").write_text(text, encoding="utf-8")
    if figures:
        _figure(content, folder / "stability")
    return text


def _summary(content: dict[str, Any]) -> str:
    rows = []
    for index, layer in enumerate(content["layers"]):
        for number, head in enumerate(layer["heads"]):
            sizes = [f"{head[name]:.3f}" for name in ("beta_lam_mean", "beta_lam_max")]
            shares = [f"{100 * head[name]:.2f} %" for name in ("share_beyond_1", "share_beyond_2")]
            errors = [_number(head[name]) for name in ("euler_error_median", "euler_error_worst", "unit_error_median")]
            rows.append([index, number, *sizes, *shares, *errors])
    header = [
        "layer", "head", "mean beta lam", "largest", "beyond 1", "beyond 2", "Euler error, median", "worst",
        "unit keys, median",
    ]  # fmt: skip
    table = markdown(header, rows)
    noise = sorted({row["size"] for row in content["survival"]})
    survival = [
        [layer, *(f"{row['at_half']:.3f}, {row['at_end']:.3f}" for row in content["survival"] if row["layer"] == layer)]
        for layer in sorted({row["layer"] for row in content["survival"]})
    ]
    return (
        f"Discretisation error of {label(content['mixer'])} `{content['checkpoint']}` on {content['sequences']} "
        f"sequences of {content['tokens']} tokens: relative difference of the state after the last token between the "
        "exact flow and an Euler step of the same keys and gates (and of the keys normalised).\n\n"
        + table
        + "\nRelative change of the state when the first half's embeddings are disturbed by noise of a size times "
        "their own deviation: at the end of that half, and after the clean second half.\n\n"
        + markdown(["layer", *(f"size {size:g}" for size in noise)], survival)
    )


def _number(value: float | None) -> str:
    return "overflow" if value is None else f"{value:.3g}"


def _figure(content: dict[str, Any], path: Path) -> None:
    layers = content["layers"]
    figure, axes = new_figure(1, 3, width=4)
    errors, shares, survival = axes[0]
    for name, marker in (("euler", "o"), ("unit", "x")):
        places = [n for n, layer in enumerate(layers) for _ in layer["heads"]]
        values = [head[f"{name}_error_median"] for layer in layers for head in layer["heads"]]
        finite = [(x, y) for x, y in zip(places, values) if y is not None and y > 0]
        if finite:
            label = "Euler, same keys" if name == "euler" else "Euler, unit keys"
            errors.scatter(*zip(*finite), marker=marker, s=22, label=label)
    errors.set(xlabel="layer, one point per head", ylabel="relative difference of the state", yscale="log")
    errors.legend(fontsize=8)
    centres = [(a * b) ** 0.5 for a, b in pairwise(EDGES)]
    for n, layer in enumerate(layers):
        counts = [sum(column) for column in zip(*(head["histogram"] for head in layer["heads"]))]
        total = max(sum(counts), 1)
        shares.plot(centres, [c / total for c in counts], lw=1, label=_legend(n, len(layers)))
    for edge in (1, 2):
        shares.axvline(edge, color="black", lw=0.8, ls=":")
    shares.set(xlabel="beta lam (dotted: 1 and 2)", ylabel="share of tokens", xscale="log")
    shares.legend(fontsize=7)
    _draw_survival(survival, content["survival"])
    save_figure(figure, path)


def _draw_survival(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    for size in sorted({row["size"] for row in rows}):
        own = [row for row in rows if row["size"] == size]
        (line,) = axis.plot([r["layer"] for r in own], [r["at_half"] for r in own], ls="--", lw=1)
        axis.plot([r["layer"] for r in own], [r["at_end"] for r in own], color=line.get_color(), label=f"size {size:g}")
    axis.set(xlabel="layer", ylabel="change of the state", yscale="log", title="dashed: before the clean half")
    axis.title.set_fontsize(9)
    axis.legend(fontsize=7)


def _legend(layer: int, layers: int) -> str | None:
    """A legend of at most eight layers."""
    return f"layer {layer}" if layer % -(-layers // 8) == 0 else None
