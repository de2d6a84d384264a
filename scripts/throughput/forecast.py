"""The forecast of `scripts.plan` beside what `scripts.throughput` measured, row by row.

Memory is the formulae's. Time is what `plan` says without the row itself: from the other rows of the file (one GPU
before several, the nearest shape), else from an assumed MFU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from efla_lm.parallel.gpus import PLANNED_GPUS
from efla_lm.settings import compose
from scripts.plan import measured
from scripts.plan.forecast import forecast
from scripts.plan.settings import PlanSettings
from scripts.throughput.points import key

Row = dict[str, Any]


def settings_of(row: Row, vocab_size: int, gpu: str) -> PlanSettings:
    """The recipe of a row, as `scripts.plan` takes it."""
    overrides = [
        f"model={row['model']}", f"size={row['size']}", f"parallel={row['parallel']}", f"model.vocab_size={vocab_size}",
        f"data.context={row['tokens']}", f"train.micro_batch={row['batch']}", f"gpus={row['gpus']}", f"gpu={gpu}",
        f"train.batch_tokens={row['batch'] * row['tokens'] * row['gpus']}", *row["options"],
    ]  # fmt: skip
    return compose("plan", overrides, PlanSettings)


def forecasts(path: Path, result: Row) -> list[Row]:
    """For each row of ours that was measured: the row, and memory (GiB), tokens/s and their source as forecast.

    Empty for a device that `scripts.plan` does not know.
    """
    gpu = next((kind for kind in PLANNED_GPUS if measured.same_gpu(str(result["gpu"]), kind)), None)
    if gpu is None:
        return []
    found = []
    for row in result["rows"]:
        if "skipped" in row or row["impl"] not in measured.OURS:
            continue
        settings = settings_of(row, result["settings"]["vocab_size"], gpu)
        others = [other for other in measured.rows_of(path) if key(other) != key(row)]
        seen = forecast(settings, gpus=row["gpus"], gpu=gpu, efficiency=settings.efficiency, rows=others)
        rate = seen.duration.tokens_per_second
        found.append({"row": row, "peak_gib": seen.memory.peak_gib, "rate": rate, "source": seen.speed.source})
    return found


def off_by(forecast: float, found: float) -> str:
    """`+4 %`: by how much the forecast is above what was measured."""
    return f"{100 * (forecast / found - 1):+.0f} %"
