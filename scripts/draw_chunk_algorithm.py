"""Draws docs/figures/chunk_algorithm.svg: the delta rule's kernels over the chunks of one sequence.

    python -m scripts.draw_chunk_algorithm

The triangular matrices are computed for EFLA on random keys; the rest is a drawing.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

FILE = Path(__file__).parents[1] / "docs" / "figures" / "chunk_algorithm.svg"
CHUNKS, C, K = 4, 12, 6
WIDTH, GAP = 2.75, 0.55
COLOURS = plt.get_cmap("Blues")(np.linspace(0.25, 0.7, CHUNKS))
FORWARD, BACKWARD = "#1f5f99", "#b0413e"


def triangles(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """T = (I + A)^-1 and P of one chunk."""
    q, k = generator.normal(size=(2, C, K)) / np.sqrt(K)
    beta = 1 / (1 + np.exp(-generator.normal(size=C)))
    lam = (k * k).sum(1)
    a = -np.expm1(-beta * lam) / lam
    A = np.tril(a[:, None] * (k @ k.T), -1)
    return np.linalg.inv(np.eye(C) + A), np.tril(q @ k.T)


def left(chunk: int) -> float:
    return 1.6 + chunk * (WIDTH + GAP)


def box(axes: Axes, chunk: int, y: float, height: float, text: str, colour: str, size: float) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (left(chunk), y), WIDTH, height, boxstyle="round,pad=0.04", facecolor="white", edgecolor=colour, lw=1.2
        )
    )
    axes.text(left(chunk) + WIDTH / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color=colour, lw=1.2))


def heading(axes: Axes, y: float, title: str, detail: str) -> None:
    axes.text(-1.9, y, title, fontsize=9, fontweight="bold", va="center")
    axes.text(-1.9, y - 0.42, detail, fontsize=7.5, va="center", color="0.35")


def matrix(axes: Axes, values: np.ndarray, x: float, y: float, name: str) -> None:
    side = 1.05
    most = np.abs(values).max()
    shown = np.where(np.tril(np.ones_like(values)) > 0, values, np.nan)
    axes.imshow(shown, extent=(x, x + side, y, y + side), cmap="RdBu", vmin=-most, vmax=most, zorder=2)
    axes.plot([x, x + side, x + side, x, x], [y, y, y + side, y + side, y], color="0.6", lw=0.6)
    axes.text(x + 0.8, y + 0.8, name, fontsize=9, ha="center", va="center")


def main() -> None:
    """Write the figure."""
    matplotlib.rcParams.update({"svg.hashsalt": "efla", "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"})
    figure, axes = plt.subplots(figsize=(10.4, 6.6))
    generator = np.random.default_rng(1)
    heading(axes, 8.1, "tokens", "C = 64 per chunk")
    for chunk in range(CHUNKS):
        x = np.linspace(left(chunk), left(chunk) + WIDTH, 9)
        for a, b in pairwise(x):
            axes.fill_between([a, b], 7.75, 8.2, facecolor=COLOURS[chunk], edgecolor="white", lw=1.0)
        axes.text(left(chunk) + WIDTH / 2, 7.98, "q, k, v, gates", ha="center", va="center", fontsize=8)
        for name, values, offset in zip("TP", triangles(generator), (0.2, 1.5), strict=True):
            matrix(axes, values, left(chunk) + offset, 6.2, f"${name}$")
        arrow(axes, (left(chunk) + WIDTH / 2, 7.7), (left(chunk) + WIDTH / 2, 7.32), FORWARD)
        arrow(axes, (left(chunk) + WIDTH / 2, 6.12), (left(chunk) + WIDTH / 2, 5.72), FORWARD)
        equations = "$X = T\\,(wV - e\\,KS)$\n$O = rQS + PX$\n$S' = S + K^{T}X$"
        box(axes, chunk, 4.5, 1.15, equations, FORWARD, 8)
        equations = "$dX = P^{T}dO + K\\,dS$\n$dR = T^{T}dX,\\; dV = w\\,dR$\n$dS' = dS + (rQ)^{T}dO - (eK)^{T}dR$"
        box(axes, chunk, 2.45, 1.15, equations, BACKWARD, 6.6)
        arrow(axes, (left(chunk) + WIDTH / 2, 4.42), (left(chunk) + WIDTH / 2, 3.68), "0.6")
        arrow(axes, (left(chunk) + WIDTH / 2, 2.37), (left(chunk) + WIDTH / 2, 1.93), BACKWARD)
        box(axes, chunk, 0.95, 0.9, "$dQ = r\\,dO\\,S^{T} + NK$\n$dK = (M{+}M^{T})K + N^{T}Q + \\ldots$", BACKWARD, 6.9)
    for chunk in range(CHUNKS + 1):
        start, end = left(chunk) - GAP, left(chunk)
        arrow(axes, (start, 5.05), (end - 0.04, 5.05), FORWARD)
        arrow(axes, (end, 3.0), (start + 0.04, 3.0), BACKWARD)
        axes.text((start + end) / 2, 5.25, f"$S_{chunk}$", ha="center", fontsize=8.5)
        axes.text((start + end) / 2, 3.2, f"$dS_{chunk}$", ha="center", fontsize=8.5)
    heading(axes, 6.85, "1  solve", "all chunks at once")
    heading(axes, 5.2, "2  scan", "chunks in order")
    heading(axes, 3.15, "3  scan_backward", "chunks in reverse")
    heading(axes, 1.55, "4, 5  gradients", "all chunks at once")
    axes.text(left(2) - GAP / 2, 4.02, "kept: T, P, S before each chunk, X", fontsize=7.5, color="0.35", ha="center",
              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
    axes.set(xlim=(-2.0, left(CHUNKS) + 0.1), ylim=(0.8, 8.4), aspect="equal")
    axes.axis("off")
    FILE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(FILE, bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
