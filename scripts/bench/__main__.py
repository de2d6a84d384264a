"""Speed of the ops beside the peers installed: `python -m scripts.bench [ops=[efla,deltanet] heads=[8] out=FILE]`.

Same inputs, same process, correctness against float64 first. One JSON per run under `results/`, with which a stopped
run continues (out=FILE); `table=FILE` prints an earlier one as a table and draws its plot of time against length (FILE
with .png).
"""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path

from efla_lm.settings import entry
from scripts.bench import mamba_calls, measure, report, run
from scripts.bench.settings import BenchSettings
from scripts.study.result_file import dated_path, read


@entry("bench", BenchSettings)
def main(settings: BenchSettings) -> int:
    """Measure the token mixers, forward, forward + backward and decoding, beside flash-linear-attention's."""
    if settings.table:
        show(Path(settings.table))
        return 0
    if not measure.is_accelerated():
        return 0
    path = dated_path(settings.out, "ops")
    start = time.perf_counter()
    mamba_calls.use_mamba_ssm(settings.mamba_ssm)
    measure.compile_side_by_side(run.warm, run.jobs(settings), settings.workers)
    print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    result = measure.open_result(path, "bench", settings, ("ops", "heads"))
    parts = {f"{op}, {heads} heads": (op, heads) for op in settings.ops for heads in settings.heads}
    for part in result.missing(list(parts)):
        decoded = run.measure_decoding(settings, *parts[part]) if "decode" in settings.directions else ()
        for row in chain(run.measure_op(settings, *parts[part]), decoded):
            result.add(row)
            place = f"{row['batch']}x{row['tokens']} H={row['heads']} {row['direction']}"
            measure.print_row(f"{row['op']:<15}{row['impl']:<10}{place}", row)
    print(f"{path}: {len(result.rows)} rows in {result.content['seconds']} s")
    show(path)
    return 0


def show(path: Path) -> None:
    """Print a result file's table and draw its plot beside it."""
    result = read(path, column="op")
    print(report.markdown(result))
    report.plot(result, path.with_suffix(".png"))
    print(f"plot: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
