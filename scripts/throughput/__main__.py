"""Speed and memory of training, the paper's Figure 4, beside flash-linear-attention:

    python -m scripts.throughput                                      all models, sizes and shapes
    python -m scripts.throughput models=[efla] sizes=[340m] shapes=[32x2048] impls=[efla_lm]
    python -m scripts.throughput gpus=2 modes=[fsdp,ddp] impls=[efla_lm]
    python -m scripts.throughput table=docs/results/throughput_h200.json

Each point runs in processes of its own, which train as train.py does. Rows are written to `out` as they come; points
that it holds already are measured again, or left alone with redo=false. A table and a plot (`out` with .png) follow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from efla_kernels.environment import describe_environment

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.settings import entry
from scripts.study import result_files as files
from scripts.throughput import report as train_report
from scripts.throughput import speed as train_speed
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
    path = files.result_path(settings.out, "throughput")
    environment = describe_environment()
    result = opened(path, environment)
    result["environment"], result["gpu"] = environment, environment["gpu"]
    result["settings"] = files.recorded(settings)
    held = {train_speed.key(row): row for row in result["rows"]}
    measured = 0
    for row in train_speed.run_all(settings, held):
        held[train_speed.key(row)] = row | {"commit": environment["commit"]}
        measured += "skipped" not in row
        result["rows"] = list(held.values())
        files.save(path, result)
        said = row.get("skipped") or train_report.cell(row)
        print(f"{row['size']} {train_report.name(row)} {train_report.shape(row)}: {said}", flush=True)
    files.save(path, result)
    show(path)
    return 0 if measured or not train_speed.plans(settings) or not settings.redo else 1


def opened(path: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """The result file as it is, or a new one. Raises UserError for figures of another GPU or version of torch."""
    if not path.is_file():
        return {"environment": environment, "rows": []}
    result = files.load(path, "size")
    for part in ("gpu", "torch", "triton"):
        was, now = result["environment"][part], environment[part]
        if was != now:
            raise UserError(f"out={path} was measured with {part} {was}, here it is {now}: name another file")
    return result


def show(path: Path) -> None:
    """Print a result file's table and draw its plot beside it."""
    result = files.load(path, "size")
    print(train_report.markdown(result))
    print(train_report.forecast_table(path, result))
    train_report.plot(result, path.with_suffix(".png"))
    print(f"plot: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
