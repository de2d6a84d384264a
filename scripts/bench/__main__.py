"""Speed of the ops beside the peers installed: `python -m scripts.bench [ops=[efla,deltanet] heads=[8] out=FILE]`.

Same inputs, same process, correctness against float64 first. One JSON per run under `results/`; `table=FILE` prints an
earlier one as a table and draws its plot of time against length (FILE with .png).
"""

from __future__ import annotations

import os
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from efla_kernels.environment import describe_environment

from efla_lm.settings import entry
from scripts.bench import mamba_calls, report, run
from scripts.bench.settings import BenchSettings
from scripts.study import result_files as files


@entry("bench", BenchSettings)
def main(settings: BenchSettings) -> int:
    """Measure the token mixers, forward, forward + backward and decoding, beside flash-linear-attention's."""
    if settings.table:
        show(Path(settings.table))
        return 0
    if not torch.cuda.is_available():
        print("no accelerator found: there is nothing to time here. `table=FILE` prints an earlier result.")
        return 0
    path = files.result_path(settings.out, "ops")
    start = time.perf_counter()
    os.environ["FLA_CACHE_RESULTS"] = "0"  # see `compile_side_by_side`
    mamba_calls.use_mamba_ssm(settings.mamba_ssm)
    if settings.workers:
        run.compile_side_by_side(settings)
    compiled = time.perf_counter() - start
    print(f"compiled in {compiled:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "environment": describe_environment(),
        "settings": files.recorded(settings),
        "rows": rows,
        "seconds": 0.0,
    }
    for op in settings.ops:
        for heads in settings.heads:
            decoded = run.measure_decoding(settings, op, heads) if "decode" in settings.directions else ()
            for row in chain(run.measure_op(settings, op, heads), decoded):
                record(rows, row)
                result["seconds"] = round(time.perf_counter() - start, 1)
                files.save(path, result)  # each time: what is measured stays, however this ends
    print(f"{path}: {len(rows)} rows in {result['seconds']} s")
    show(path)
    return 0


def record(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Keep a row and say it."""
    rows.append(row)
    name = f"{row['op']:<15}{row['impl']:<10}{row['batch']}x{row['tokens']} H={row['heads']} {row['direction']}"
    if "skipped" in row:
        print(f"{name:<48} skipped: {row['skipped']}", flush=True)
    else:
        print(
            f"{name:<48} device {row['device_us']:9.1f} us  wall {row['wall_us']:9.1f} us  "
            f"rel_err {row['rel_err']:.1e}  peak {row['peak_mib']:.0f} MiB",
            flush=True,
        )


def show(path: Path) -> None:
    """Print a result file's table and draw its plot beside it."""
    result = files.load(path, "op")
    print(report.markdown(result))
    report.plot(result, path.with_suffix(".png"))
    print(f"plot: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
