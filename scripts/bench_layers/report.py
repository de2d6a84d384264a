"""The result file of `python -m scripts.bench_layers` as a table, and which implementation each layer should take."""

from __future__ import annotations

from typing import Any

from scripts.bench_layers.settings import IMPLEMENTATIONS
from scripts.study import table

EQUAL = 1.03  # within this factor of the fastest, preference decides
PREFERENCE = [impl for impl in IMPLEMENTATIONS if impl != "torch"]

Row = dict[str, Any]


def choices(rows: list[Row]) -> dict[tuple[str, int], str]:
    """By (layer, width): of the right implementations that are as fast as the fastest, the first by preference."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["direction"] == "fwd_bwd" and row.get("right"):
            found.setdefault((row["layer"], row["hidden"]), {})[row["impl"]] = row["device_us"]
    chosen = {}
    for place, times in found.items():
        equal = [impl for impl, us in times.items() if us <= EQUAL * min(times.values())]
        chosen[place] = min(equal, key=lambda impl: PREFERENCE.index(impl) if impl in PREFERENCE else len(PREFERENCE))
    return chosen


def markdown(result: Row) -> str:
    """A table with a row per layer, width and implementation; then ratios to fla, choices and what was left out."""
    environment, settings, rows = result["environment"], result["settings"], result["rows"]
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in result["packages"].items())
    head = (
        f"{environment['gpu']}, driver {environment['driver']}, torch {environment['torch']}, triton "
        f"{environment['triton']}, {versions}, commit {environment['commit']}. {settings['batch']} x "
        f"{settings['tokens']} tokens, {settings['dtype']}, vocabulary {settings['vocabulary']}. Median microseconds "
        "on the device; the largest relative error against float64; MiB that forward + backward add at their peak."
    )
    timed = {(r["layer"], r["hidden"], r["impl"], r["direction"]): r for r in rows if "device_us" in r}
    chosen, cells, notes = choices(rows), [], []
    for (layer, hidden, impl, direction), row in timed.items():
        if direction == "fwd_bwd":
            forward = timed.get((layer, hidden, impl, "fwd"))
            mark = "**" if chosen.get((layer, hidden)) == impl else ""
            error = f"{max(row['rel_errs'].values()):.1e}" + ("" if row["right"] else " (beyond the bound)")
            first = "" if forward is None else f"{forward['device_us']:.0f}"
            cells.append([layer, hidden, mark + impl + mark, first, f"{row['device_us']:.0f}", error,
                          f"{row['peak_mib']:.0f}"])  # fmt: skip
        theirs = timed.get((layer, hidden, "fla", direction))
        if impl == "ours" and theirs is not None:
            notes.append(
                f"- {layer}, width {hidden}, {direction}: {theirs['device_us'] / row['device_us']:.2f}x less device "
                f"time than fla, {row['peak_mib']:.0f} against {theirs['peak_mib']:.0f} MiB"
            )
    notes += [f"- {layer}, width {hidden}: {impl}" for (layer, hidden), impl in chosen.items()]
    skipped = dict.fromkeys((r["layer"], r["impl"], r["skipped"]) for r in rows if "skipped" in r)
    notes += [f"- {layer}, {impl}, not measured: {why}" for layer, impl, why in skipped]
    columns = ["layer", "width", "implementation", "forward", "forward + backward", "rel. error", "MiB"]
    return f"{head}\n\n{table.markdown(columns, cells)}\n" + "\n".join(notes) + "\n"
