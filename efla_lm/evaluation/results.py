"""The result file and the printed table of an evaluation.

`results.TASK.METRIC` is written as lm-eval writes it (`acc_norm,none` beside `acc_norm_stderr,none`). Beside it stand
what lm-eval reports (versions, n-shot, n-samples, configs) and, under `evaluation`, all that the numbers depend on.
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from efla_data.atomic import write_atomically
from efla_kernels.environment import installed_version
from rich.console import Console
from rich.table import Table

from efla_lm.errors import UserError

# Columns of the paper's Table 1 [paper, section 3]: heading, task, metric in lm-eval's words, one of the accuracies
PAPER_COLUMNS = (
    ("Wiki ppl", "wikitext", "word_perplexity,none", False),
    ("LMB ppl", "lambada_openai", "perplexity,none", False),
    ("LMB acc", "lambada_openai", "acc,none", True),
    ("PIQA acc", "piqa", "acc,none", True),
    ("Hella acc_n", "hellaswag", "acc_norm,none", True),
    ("Wino acc", "winogrande", "acc,none", True),
    ("ARC-e acc", "arc_easy", "acc,none", True),
    ("ARC-c acc_n", "arc_challenge", "acc_norm,none", True),
    ("BoolQ acc", "boolq", "acc,none", True),
    ("OBQA acc_n", "openbookqa", "acc_norm,none", True),
    ("SciQ acc", "sciq", "acc,none", True),
)

PAPER_TASKS = tuple(dict.fromkeys(task for _, task, *_ in PAPER_COLUMNS))  # the ten, in the order of the columns
PACKAGES = ("efla-lm", "lm_eval", "torch", "transformers", "tokenizers", "datasets")


def versions() -> dict[str, str]:
    """Versions of all that can move a number."""
    found = {name: installed_version(name) or "not installed" for name in PACKAGES}
    return {"python": platform.python_version(), **found}


def write(folder: Path, stem: str, result: dict[str, Any]) -> Path:
    """Write `FOLDER/STEM-DATE-TIME.json`, whole or not at all, never over another; NaN and infinity become null."""
    folder.mkdir(parents=True, exist_ok=True)
    base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = folder / f"{base}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{base}-{number}.json"
    try:
        write_atomically(path, json.dumps(_plain(result), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{path}: the result cannot be written ({reason}); make room, or give out=FOLDER") from error
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def rows(result: dict[str, Any]) -> Iterator[tuple[str, str, float, float | None, int]]:
    """(task, metric, value, standard error, documents) of every number in a result."""
    for task, numbers in result["results"].items():
        for key, value in numbers.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = numbers.get(f"{metric}_stderr,{filter_name}")
            yield task, metric, float(value), error if isinstance(error, float) else None, numbers.get("sample_len", 0)


def paper_average(result: dict[str, Any]) -> float | None:
    """Mean of the nine accuracies of Table 1 in percent, or None unless all nine are there."""
    values = [result["results"].get(task, {}).get(metric) for _, task, metric, higher in PAPER_COLUMNS if higher]
    return None if None in values else 100 * sum(values) / len(values)


def _shown(value: float) -> str:
    """Four decimals; from a million on, as perplexities of an untrained model are, three significant digits."""
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.2e}"


def print_table(result: dict[str, Any], title: str, console: Console | None = None) -> None:
    """All numbers; those that the paper's Table 1 shows are bold, and missing tasks are listed with the reason."""
    # a file or pipe has no width of its own, and the numbers must not be cut
    console = console or Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    in_paper = {(task, metric.partition(",")[0]) for _, task, metric, _ in PAPER_COLUMNS}
    table = Table(title=title, title_justify="left")
    table.add_column("task")
    table.add_column("metric")
    for heading in ("value", "std error", "documents"):
        table.add_column(heading, justify="right")
    for task, metric, value, error, count in rows(result):
        style = "bold" if (task, metric) in in_paper else None
        table.add_row(task, metric, _shown(value), "" if error is None else _shown(error), str(count), style=style)
    for task in result["missing"]:
        table.add_row(task, "missing", "", "", "", style="red")
    console.print(table)
    average = paper_average(result)
    if average is not None:
        console.print(f"mean of the nine accuracies of the paper's Table 1: {average:.1f} %")
