"""The result file of `python -m scripts.bench_layers` as a table, and which implementation each layer should take."""

from __future__ import annotations

from typing import Any

from scripts.bench_layers.settings import IMPLEMENTATIONS

EQUAL = 1.03  # within this factor of the fastest, preference decides
PREFERENCE = [impl for impl in IMPLEMENTATIONS if impl != "torch"]


def choices(rows: list[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """By (layer, width): the first by preference among the right ones that are as fast as the fastest."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in rows:
        if row["direction"] == "fwd_bwd" and row.get("right"):
            found.setdefault((row["layer"], row["hidden"]), {})[row["impl"]] = row["device_us"]
    chosen = {}
    for place, times in found.items():
        equal = [impl for impl, us in times.items() if us <= EQUAL * min(times.values())]
        chosen[place] = min(equal, key=lambda impl: PREFERENCE.index(impl) if impl in PREFERENCE else len(PREFERENCE))
    return chosen


def markdown(result: dict[str, Any]) -> str:
    """A table with a row per layer, width and implementation; then ratios to fla, choices and what was left out."""
    environment, settings, rows = result["environment"], result["settings"], result["rows"]
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in result["packages"].items())
    lines = [
        f"{environment['gpu']}, driver {environment['driver']}, torch {environment['torch']}, triton "
        f"{environment['triton']}, {versions}, commit {environment['commit']}. {settings['batch']} x "
        f"{settings['tokens']} tokens, {settings['dtype']}, vocabulary {settings['vocabulary']}. Median microseconds "
        "on the device; the largest relative error against float64; MiB that forward + backward add at their peak.",
        "",
        "| layer | width | implementation | forward | forward + backward | rel. error | MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    timed = {(r["layer"], r["hidden"], r["impl"], r["direction"]): r for r in rows if "device_us" in r}
    chosen = choices(rows)
    for (layer, hidden, impl, direction), row in timed.items():
        if direction == "fwd_bwd":
            before = timed.get((layer, hidden, impl, "fwd"))
            forward = "" if before is None else f"{before['device_us']:.0f}"
            mark = "**" if chosen.get((layer, hidden)) == impl else ""
            wrong = "" if row["right"] else " (beyond the bound)"
            lines.append(
                f"| {layer} | {hidden} | {mark}{impl}{mark} | {forward} | {row['device_us']:.0f} | "
                f"{max(row['rel_errs'].values()):.1e}{wrong} | {row['peak_mib']:.0f} |"
            )
    lines.append("")
    for (layer, hidden, impl, direction), row in timed.items():
        theirs = timed.get((layer, hidden, "fla", direction))
        if impl == "ours" and theirs is not None:
            lines.append(
                f"- {layer}, width {hidden}, {direction}: {theirs['device_us'] / row['device_us']:.2f}x less device "
                f"time than fla, {row['peak_mib']:.0f} against {theirs['peak_mib']:.0f} MiB"
            )
    lines += [f"- {layer}, width {hidden}: {impl}" for (layer, hidden), impl in chosen.items()]
    skipped = dict.fromkeys((r["layer"], r["impl"], r["skipped"]) for r in rows if "skipped" in r)
    lines += [f"- {layer}, {impl}, not measured: {why}" for layer, impl, why in skipped]
    return "\n".join(lines) + "\n"
