"""Speed of the layers around the token mixers: `python -m scripts.bench_layers [layers=[loss] hidden=[1024] out=FILE]`.

Convolution, loss, norms and SwiGLU in PyTorch, torch.compile, flash-linear-attention, liger-kernel, cut-cross-entropy
and ours, whichever can be imported: same inputs, same process, correctness against float64 first. The result file is
written after every layer; `table=FILE` prints an earlier one. Exit code 1 where ours is wrong or does not run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from efla_kernels.environment import describe_environment, installed_version

from efla_lm.settings import entry
from scripts.bench_layers import report as layer_report
from scripts.bench_layers import run as layer_run
from scripts.bench_layers.settings import LayerBenchSettings
from scripts.study import result_files as files

PACKAGES = ("flash-linear-attention", "liger-kernel", "cut-cross-entropy")


@entry("bench_layers", LayerBenchSettings)
def main(settings: LayerBenchSettings) -> int:
    """Measure the layers around the mixers, forward and forward + backward, beside the installed packages'."""
    if settings.table:
        print(layer_report.markdown(files.load(Path(settings.table), "layer")))
        return 0
    if not torch.cuda.is_available():
        print("no accelerator found: there is nothing to time here. `table=FILE` prints an earlier result.")
        return 0
    path = files.result_path(settings.out, "layers")
    packages = {name: installed_version(name) for name in PACKAGES}
    missing = [name for name, version in packages.items() if version is None]
    if missing:
        print(f"not installed, left out: {', '.join(missing)}", flush=True)
    start = time.perf_counter()
    os.environ["FLA_CACHE_RESULTS"] = "0"  # tuning results of the compiling processes, which disturb each other
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are the threads
    left_out = layer_run.compile_side_by_side(settings) if settings.workers else {}
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "environment": describe_environment(), "packages": packages, "settings": files.recorded(settings), "rows": rows,
        "seconds": 0.0,
    }  # fmt: skip
    for layer in settings.layers:
        for hidden in settings.hidden:
            for row in layer_run.measure_layer(settings, layer, hidden, left_out, start + settings.budget_s):
                record(rows, row)
                result["seconds"] = round(time.perf_counter() - start, 1)
                files.save(path, result)  # each time: what is measured stays, however this ends
    print(f"{path}: {len(rows)} rows in {result['seconds']} s")
    print(layer_report.markdown(result))
    return 1 if any("failed" in row for row in rows) else 0


def record(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Keep a row and say it."""
    rows.append(row)
    name = f"{row['layer']:<20}{row['impl']:<9}{row['hidden']:<6}{row['direction']:<9}"
    if "skipped" in row:
        print(f"{name} skipped: {row['skipped']}", flush=True)
    else:
        wrong = "" if row["right"] else "  BEYOND THE BOUND"
        print(
            f"{name} device {row['device_us']:9.1f} us  wall {row['wall_us']:9.1f} us  "
            f"peak {row['peak_mib']:7.0f} MiB  rel_err {max(row['rel_errs'].values()):.1e}{wrong}",
            flush=True,
        )


if __name__ == "__main__":
    main()
