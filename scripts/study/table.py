"""Numbers and tables as the studies print them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MISSING = "missing"


def mean_and_spread(values: Iterable[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for one value)."""
    numbers = list(values)
    return statistics.fmean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def number(value: float, digits: int = 2, sign: bool = False) -> str:
    """A number with `digits` decimals; from a million on with three significant digits, as 4.56e+11."""
    plus = "+" if sign else ""
    return f"{value:{plus}.2e}" if abs(value) >= 1e6 else f"{value:{plus}.{digits}f}"


def mean_text(values: Sequence[float], digits: int = 2, unit: str = "", sign: bool = False) -> str:
    """`0.65 ± 0.06`: mean and spread of several values; one value has no spread, and none is missing."""
    if not values:
        return MISSING
    mean, spread = mean_and_spread(values)
    return number(mean, digits, sign) + unit + (f" ± {number(spread, digits)}" if len(values) > 1 else "")


def percent_text(shares: Sequence[float]) -> str:
    """`93.02 % ± 0.85`: `mean_text` of shares between 0 and 1, in percent."""
    return mean_text([100 * share for share in shares], unit=" %")


def markdown(header: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; every cell as `str` gives it."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines) + "\n"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A plain CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
