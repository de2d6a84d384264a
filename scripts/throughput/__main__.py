"""Speed and memory of training, the paper's Figure 4, beside flash-linear-attention:

    python -m scripts.throughput                                      all models, sizes and shapes
    python -m scripts.throughput models=[efla] sizes=[340m] shapes=[32x2048] impls=[efla_lm]
    python -m scripts.throughput gpus=2 modes=[fsdp,ddp] impls=[efla_lm]
    python -m scripts.throughput table=docs/results/throughput_h200.json

Each point runs in processes of its own, which train as train.py does. Rows are written to `out` as they come; points
that it has already are measured again, or left alone with redo=false. A table and a plot (`out` with .png) follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from efla_kernels.environment import describe_environment

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.settings import entry
from scripts.study import result_file
from scripts.throughput import points, report
from scripts.throughput.settings import ThroughputSettings


@entry("throughput", ThroughputSettings)
def main(settings: ThroughputSettings) -> int:
    """Measure tokens per second, MFU, peak memory and start-up of training by model, size and shape."""
    if settings.table:
        show(Path(settings.table))
        return 0
    if settings.device == "auto" and not torch.cuda.is_available():
        print(
            "no accelerator found: there is nothing to time here. `table=FILE` prints an earlier result; device=cpu "
            "times a CPU, with small models: sizes=[tiny] shapes=[2x64]."
        )
        return 0
    choose_device(settings.device)
    path = result_file.dated_path(settings.out, "throughput")
    environment = describe_environment()
    result = opened(path, environment)
    result["environment"], result["gpu"] = environment, environment["gpu"]
    result["command"] = result_file.command_line("throughput", settings)
    result["settings"] = result_file.portable(settings)
    rows = {points.key(row): row for row in result["rows"]}
    measured = 0
    for row in points.run_all(settings, rows):
        rows[points.key(row)] = row | {"commit": environment["commit"]}
        measured += "skipped" not in row
        result["rows"] = list(rows.values())
        result_file.write(path, result)
        text = row.get("skipped") or report.cell(row)
        print(f"{row['size']} {report.name(row)} {report.shape(row)}: {text}", flush=True)
    result_file.write(path, result)
    show(path)
    return 0 if measured or not points.plans(settings) or not settings.redo else 1


def opened(path: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """The result file as it is, or a new one. Raises UserError for figures of another GPU or version of torch."""
    if not path.is_file():
        return {"environment": environment, "rows": []}
    result = result_file.read(path, column="size")
    for part in ("gpu", "torch", "triton"):
        was, is_here = result["environment"][part], environment[part]
        if was != is_here:
            raise UserError(f"out={path} was measured with {part} {was}, here it is {is_here}: name another file")
    return result


def show(path: Path) -> None:
    """Print a result file's table and draw its plot beside it."""
    result = result_file.read(path, column="size")
    print(report.markdown(result))
    print(report.forecast_table(path, result))
    left_out = report.plot(result, path.with_suffix(".png"))
    note = f" of one visit; {left_out} rows of other commits or options are in the table only" if left_out else ""
    print(f"plot: {path.with_suffix('.png')}{note}")


if __name__ == "__main__":
    main()
