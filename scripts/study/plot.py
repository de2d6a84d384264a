"""Figures in one style: labels and colours of the models, panels, and PNG and PDF files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

COLOURS = {
    "efla": "#c0392b",
    "deltanet": "#2471a3",
    "gated_efla": "#e59866",
    "gated_deltanet": "#85c1e9",
    "mamba2": "#7d8a2e",
    "attention": "#555555",
}
LABELS = {
    "efla": "EFLA",
    "deltanet": "DeltaNet",
    "gated_efla": "Gated EFLA",
    "gated_deltanet": "Gated DeltaNet",
    "mamba2": "Mamba-2",
    "attention": "Transformer",
}
ALIASES = {"transformer": "attention"}  # the option of conf/model


def label(model: str) -> str:
    """`EFLA` for the mixer or model option `efla`."""
    return LABELS[ALIASES.get(model, model)]


def colour(model: str) -> str:
    """The colour of a model in all figures."""
    return COLOURS[ALIASES.get(model, model)]


def in_order(models: Iterable[str]) -> list[str]:
    """Models in the order of all tables and figures, each once."""
    order = list(LABELS)
    return sorted(set(models), key=lambda model: order.index(ALIASES.get(model, model)))


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
