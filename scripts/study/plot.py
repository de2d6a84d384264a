"""Figures in one style: labels and colours of the models, panels, and PNG and PDF files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from efla_lm.models.rules import RULES, Rule


def _rule(model: str) -> Rule:
    """The row of a mixer or of an option of conf/model (`attention` is the option `transformer`)."""
    return RULES.get(model) or next(rule for rule in RULES.values() if rule.option == model)


def label(model: str) -> str:
    """`EFLA` for the mixer or model option `efla`."""
    return _rule(model).label


def colour(model: str) -> str:
    """The colour of a model in all figures."""
    return _rule(model).colour


def in_order(models: Iterable[str]) -> list[str]:
    """Models in the order of `RULES`, each once."""
    order = list(RULES.values())
    return sorted(set(models), key=lambda model: order.index(_rule(model)))


def new_figure(rows: int, columns: int, width: float = 3.4, height: float = 2.7, **options: Any) -> tuple[Any, Any]:
    """(figure, axes [rows, columns]) drawn without a display; width and height of a panel in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, axes


def save_figure(figure: Any, path: Path, pdf: bool = True) -> None:
    """Write `path` as PNG (a palette of 128 colours: a fourth of the bytes) and as PDF, each with its ending."""
    from matplotlib import pyplot
    from PIL import Image

    figure.tight_layout()
    png = path.with_suffix(".png")
    figure.savefig(png, dpi=120)
    with Image.open(png) as image:
        small = image.convert("RGB").quantize(128)
    small.save(png, optimize=True)
    if pdf:
        figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
    pyplot.close(figure)
