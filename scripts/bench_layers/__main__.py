"""Speed of the layers around the token mixers: `python -m scripts.bench_layers [layers=[loss] hidden=[1024] out=FILE]`.

Convolution, loss, norms and SwiGLU in PyTorch, torch.compile, flash-linear-attention, liger-kernel, cut-cross-entropy
and ours, whichever can be imported: same inputs, same process, correctness against float64 first. The result file is
written after every row; `table=FILE` prints an earlier one. Exit code 1 where ours is wrong or does not run.
"""

from __future__ import annotations

import os
import time

from efla_kernels.environment import installed_version

from efla_lm.settings import entry
from scripts.bench import measure
from scripts.bench_layers import report, run
from scripts.bench_layers.settings import LayerBenchSettings
from scripts.study.result_file import dated_path, read

PACKAGES = ("flash-linear-attention", "liger-kernel", "cut-cross-entropy")


@entry("bench_layers", LayerBenchSettings)
def main(settings: LayerBenchSettings) -> int:
    """Measure the layers around the mixers, forward and forward + backward, beside the installed packages'."""
    if settings.table:
        print(report.markdown(read(settings.table, column="layer")))
        return 0
    if not measure.is_accelerated():
        return 0
    path = dated_path(settings.out, "layers")
    packages = {name: installed_version(name) for name in PACKAGES}
    if missing := [name for name, version in packages.items() if version is None]:
        print(f"not installed, left out: {', '.join(missing)}", flush=True)
    start = time.perf_counter()
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are the threads
    left_out = run.compile_side_by_side(settings)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    result = measure.open_result(path, "bench_layers", settings, ("layers", "hidden"), packages=packages)
    parts = {f"{layer}, width {hidden}": (layer, hidden) for layer in settings.layers for hidden in settings.hidden}
    for part in result.missing(list(parts)):
        for row in run.measure_layer(settings, *parts[part], left_out, start + settings.budget_s):
            result.add(row)
            measure.print_row(f"{row['layer']:<20}{row['impl']:<9}{row['hidden']:<6}{row['direction']:<9}", row)
    print(f"{path}: {len(result.rows)} rows in {result.content['seconds']} s")
    print(report.markdown(result.content))
    return 1 if any("failed" in row for row in result.rows) else 0


if __name__ == "__main__":
    main()
