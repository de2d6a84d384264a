"""The benchmark's result file as a table for a README and as a plot of time against length."""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from typing import Any

from scripts.bench.settings import OPS
from scripts.study import table
from scripts.study.plot import colour, label, new_figure, save_figure

# The op that each of ours is compared with: fla has no EFLA, and DeltaNet is its fastest rule of this kind.
BASELINE = {"efla": "deltanet", **{op: op for op in OPS if op != "efla"}}
PEERS = ("fla", "mamba_ssm")  # fla's Mamba-2 is simple_gla with B and C repeated for every head
STYLES = {"ours": "-o", "fla": "--s", "mamba_ssm": ":^"}
WAYS = {"fwd": "forward", "fwd_bwd": "forward + backward"}

Row = dict[str, Any]


def _place(row: Row) -> tuple[int, int, int]:
    return row["heads"], row["batch"], row["tokens"]


def markdown(result: dict[str, Any]) -> str:
    """One table per direction: rows are ops and implementations, columns are shapes; then the ratios to fla."""
    environment = result["environment"]
    parts = [
        f"{environment['gpu']}, driver {environment['driver']}, torch {environment['torch']}, triton "
        f"{environment['triton']}, fla {environment['flash-linear-attention']}, commit {environment['commit']}. "
        "Median microseconds on the device (wall time per call in parentheses); the largest relative error against "
        "float64 over the seeds; MiB that a call adds at its peak."
    ]
    for direction in ("fwd", "fwd_bwd", "decode"):
        rows = [r for r in result["rows"] if r["direction"] == direction and "device_us" in r]
        if not rows:
            continue
        shapes = sorted({_place(r) for r in rows}, key=lambda s: (s[0], s[2], s[1]))
        by_name: dict[tuple[bool, str, str], dict[tuple[int, int, int], Row]] = {}
        for row in rows:
            by_name.setdefault((row["impl"] != "ours", row["op"], row["impl"]), {})[_place(row)] = row
        lines = []
        for (_, op, impl), found in sorted(by_name.items()):
            cells = [f"{found[s]['device_us']:.0f} ({found[s]['wall_us']:.0f})" if s in found else "" for s in shapes]
            error, peak = (max(r[name] for r in found.values()) for name in ("rel_err", "peak_mib"))
            lines.append([f"{label(op)}, {impl}", *cells, f"{error:.1e}", f"{peak:.0f}"])
        header = ["", *(f"H={h} {b}x{t}" for h, b, t in shapes), "rel. error", "MiB"]
        parts += [f"**{direction}**", table.markdown(header, lines)]
    parts.append("\n".join(ratio_lines(result)))
    skipped = {(r["op"], r["impl"], r["direction"], r["skipped"]) for r in result["rows"] if "skipped" in r}
    parts.append("\n".join(f"- {label(op)}, {impl}, {way}: {why}" for op, impl, way, why in sorted(skipped)))
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def ratios(
    result: dict[str, Any], op: str, direction: str, figure: str = "device_us", peer: str = "fla", own: str = "ours"
) -> dict[str, float]:
    """The peer's figure over ours by shape ("H=8 8x2048"), for the shapes that both have."""
    ours, theirs = {}, {}
    for row in result["rows"]:
        if figure in row and row["direction"] == direction:
            name = f"H={row['heads']} {row['batch']}x{row['tokens']}"
            if (row["op"], row["impl"]) == (op, own):
                ours[name] = row[figure]
            if (row["op"], row["impl"]) == (BASELINE[op], peer):
                theirs[name] = row[figure]
    return {name: theirs[name] / ours[name] for name in ours if name in theirs}


def ratio_lines(result: dict[str, Any]) -> list[str]:
    """How many times faster than the peers, memory beside theirs, and our other rules beside EFLA."""
    lines = []
    for (op, base), direction, peer in product(BASELINE.items(), ("fwd", "fwd_bwd", "decode"), PEERS):
        for figure, kind in (("device_us", "device"), ("wall_us", "wall")):
            if found := ratios(result, op, direction, figure, peer):
                mean, least = statistics.geometric_mean(found.values()), min(found, key=lambda n: found[n])
                lines.append(
                    f"- {label(op)} {direction} against {peer}'s {label(base)}, {kind} time: {mean:.2f}x "
                    f"(geometric mean of {len(found)}), least {found[least]:.2f}x at {least}"
                )
    for (op, base), own, peer in product(BASELINE.items(), ("ours", "ours_recompute"), PEERS):
        if found := ratios(result, op, "fwd_bwd", "peak_mib", peer, own):
            shares = [1 / ratio for ratio in found.values()]
            lines.append(
                f"- {label(op)} ({own}) fwd_bwd, memory over {peer}'s {label(base)}: "
                f"{statistics.geometric_mean(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
            )
    times = {
        (r["op"], _place(r)): r["device_us"]
        for r in result["rows"]
        if (r["impl"], r["direction"]) == ("ours", "fwd_bwd") and "device_us" in r
    }
    for op in ("gated_efla", "deltanet", "gated_deltanet"):
        parts = [times[op, place] / t for (name, place), t in times.items() if name == "efla" and (op, place) in times]
        if parts:
            lines.append(
                f"- {label(op)} over EFLA, fwd_bwd, ours: {statistics.geometric_mean(parts):.3f} of its time "
                f"({min(parts):.3f} to {max(parts):.3f})"
            )
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Device time against T: a column of panels per number of heads, a row per direction.

    A panel shows one direction alone, so that a peer which has only a forward pass is never beside both passes of ours.
    """
    rows = [r for r in result["rows"] if "device_us" in r and r["direction"] in WAYS and r["impl"] in STYLES]
    heads, ways = sorted({r["heads"] for r in rows}), [way for way in WAYS if any(r["direction"] == way for r in rows)]
    figure, axes = new_figure(max(1, len(ways)), max(1, len(heads)), width=4.2, height=3.4)
    for (down, way), (across, count) in product(enumerate(ways), enumerate(heads)):
        axis, own = axes[down][across], [r for r in rows if (r["direction"], r["heads"]) == (way, count)]
        for op, (impl, style) in product(OPS, STYLES.items()):
            curve = sorted((r["tokens"], r["device_us"]) for r in own if (r["op"], r["impl"]) == (op, impl))
            if curve:
                axis.plot(*zip(*curve), style, label=f"{label(op)}, {impl}", color=colour(op), markersize=4)
        axis.set(title=f"H = {count}, {WAYS[way]}", xlabel="tokens per sequence", ylabel="device time, us")
        axis.set_xscale("log", base=2)
        lengths = sorted({r["tokens"] for r in own})
        axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        if own:
            axis.set_ylim(0, 1.5 * max(r["device_us"] for r in own))  # room for the legend
            axis.legend(fontsize=7, loc="upper left", ncols=2)
    save_figure(figure, path, pdf=False)
