"""What the experiments' result files share: where and with what they ran, means, tables, figures."""

from __future__ import annotations

import csv
import json
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from efla_kernels.environment import commit, installed_version

from efla_lm.errors import UserError
from efla_lm.run.directory import write_atomically

COLOURS = {
    "efla": "#c0392b",
    "deltanet": "#2471a3",
    "gated_efla": "#e59866",
    "gated_deltanet": "#85c1e9",
    "mamba2": "#7d8a2e",
    "attention": "#555555",
}
NAMES = {
    "efla": "EFLA",
    "deltanet": "DeltaNet",
    "gated_efla": "Gated EFLA",
    "gated_deltanet": "Gated DeltaNet",
    "mamba2": "Mamba-2",
    "attention": "Transformer",
}


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and commit, as every result file names them."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit()}
    found["triton"] = installed_version("triton")
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {platform.machine()}"
    found["threads"] = torch.get_num_threads()
    return found


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def read_json(paths: Sequence[str], experiment: str) -> list[dict[str, Any]]:
    """Result files of one experiment, in the order given.

    Raises:
        UserError: a file is missing, no JSON, or of another experiment.
    """
    contents = []
    for path in paths:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{path}: no such result file") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{path}: no JSON ({error})") from None
        if not isinstance(content, dict) or content.get("experiment") != experiment:
            raise UserError(f"{path}: expected a result file of the experiment {experiment}")
        contents.append(content)
    return contents


def merge(contents: Sequence[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One result file from several that were put together to `runs`: the first one's head, and all environments."""
    environments = [content["environment"] for content in contents]
    same = all(environment == environments[0] for environment in environments)
    return {**contents[0], "environment": environments[0] if same else environments, "runs": runs}


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one value)."""
    numbers = list(values)
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A plain CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; every cell as `str` gives it."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def new_figure(rows: int, columns: int, width: float = 3.4, height: float = 2.7) -> tuple[Any, Any]:
    """(figure, axes [rows, columns]) drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, axes


def save_figure(figure: Any, path: Path) -> list[Path]:
    """PNG (a palette of 128 colours: a fourth of the bytes) and PDF beside each other; `path` without ending."""
    from matplotlib import pyplot
    from PIL import Image

    figure.tight_layout()
    png, pdf = path.with_suffix(".png"), path.with_suffix(".pdf")
    figure.savefig(png, dpi=120)
    with Image.open(png) as image:
        small = image.convert("RGB").quantize(128)
    small.save(png, optimize=True)
    figure.savefig(pdf, metadata={"CreationDate": None})
    pyplot.close(figure)
    return [png, pdf]
