"""The benchmark's result file as a table for a README and as a plot of time against length."""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from typing import Any

LABELS = {
    "efla": "EFLA", "deltanet": "DeltaNet", "gated_deltanet": "Gated DeltaNet", "gated_efla": "Gated EFLA",
    "mamba2": "Mamba-2",
}  # fmt: skip
# the op that each of ours is compared with: fla has no EFLA of its own, and DeltaNet is its fastest rule of this kind
BASELINE = {"efla": "deltanet", **{op: op for op in LABELS if op != "efla"}}
PEERS = ("fla", "mamba_ssm")  # fla's Mamba-2 is simple_gla with B and C repeated for every head


def _key(row: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def markdown(result: dict[str, Any]) -> str:
    """One table per direction: rows are ops and implementations, columns are shapes; then the ratios to fla."""
    environment = result["environment"]
    lines = [
        f"{environment['gpu']}, driver {environment['driver']}, torch {environment['torch']}, triton "
        f"{environment['triton']}, fla {environment['flash-linear-attention']}, commit {environment['commit']}. "
        "Median microseconds on the device (wall time per call in parentheses); the largest relative error against "
        "float64 over the seeds; MiB that a call adds at its peak."
    ]
    for direction in ("fwd", "fwd_bwd", "decode"):
        rows = [r for r in result["rows"] if r["direction"] == direction and "device_us" in r]
        if not rows:
            continue
        shapes = sorted({_key(r, "heads", "batch", "tokens") for r in rows}, key=lambda s: (s[0], s[2], s[1]))
        heading = " | ".join(f"H={h} {b}x{t}" for h, b, t in shapes)
        lines += ["", f"**{direction}**", "", f"| | {heading} | rel. error | MiB |", "|---" * (len(shapes) + 3) + "|"]
        by_name: dict[tuple[str, str], dict[tuple[Any, ...], dict[str, Any]]] = {}
        for row in rows:
            by_name.setdefault((row["op"], row["impl"]), {})[_key(row, "heads", "batch", "tokens")] = row
        for (op, impl), found in sorted(by_name.items(), key=lambda item: (item[0][1] != "ours", item[0])):
            cells = [f"{found[s]['device_us']:.0f} ({found[s]['wall_us']:.0f})" if s in found else "" for s in shapes]
            error = max(r["rel_err"] for r in found.values())
            peak = max(r["peak_mib"] for r in found.values())
            lines.append(f"| {LABELS[op]}, {impl} | {' | '.join(cells)} | {error:.1e} | {peak:.0f} |")
    lines += ["", *ratio_lines(result)]
    skipped = {(r["op"], r["impl"], r["direction"], r["skipped"]) for r in result["rows"] if "skipped" in r}
    lines += ["", *(f"- {LABELS[op]}, {impl}, {way}: {why}" for op, impl, way, why in sorted(skipped))]
    return "\n".join(lines).rstrip() + "\n"


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
    """How many times faster than the peers, and what Gated EFLA and DeltaNet of ours cost beside EFLA."""
    lines = []
    for op, base in BASELINE.items():
        for direction in ("fwd", "fwd_bwd", "decode"):
            for peer, (figure, label) in product(PEERS, (("device_us", "device"), ("wall_us", "wall"))):
                found = ratios(result, op, direction, figure, peer)
                if found:
                    mean, least = statistics.geometric_mean(found.values()), min(found, key=lambda n: found[n])
                    lines.append(
                        f"- {LABELS[op]} {direction} against {peer}'s {LABELS[base]}, {label} time: {mean:.2f}x "
                        f"(geometric mean of {len(found)}), least {found[least]:.2f}x at {least}"
                    )
    for (op, base), own, peer in product(BASELINE.items(), ("ours", "ours_recompute"), PEERS):
        found = ratios(result, op, "fwd_bwd", "peak_mib", peer, own)
        if found:
            lines.append(
                f"- {LABELS[op]} ({own}) fwd_bwd, memory over {peer}'s {LABELS[base]}: "
                f"{1 / statistics.geometric_mean(found.values()):.2f} ({1 / max(found.values()):.2f} to "
                f"{1 / min(found.values()):.2f})"
            )
    times = {
        (r["op"], *_key(r, "heads", "batch", "tokens")): r["device_us"]
        for r in result["rows"]
        if r["impl"] == "ours" and r["direction"] == "fwd_bwd" and "device_us" in r
    }
    for op in ("gated_efla", "deltanet", "gated_deltanet"):
        parts = [
            times[op, *shape] / t for (name, *shape), t in times.items() if name == "efla" and (op, *shape) in times
        ]
        if parts:
            lines.append(
                f"- {LABELS[op]} over EFLA, fwd_bwd, ours: {statistics.geometric_mean(parts):.3f} of its time "
                f"({min(parts):.3f} to {max(parts):.3f})"
            )
    return lines


def plot(result: dict[str, Any], path: Path) -> None:
    """Device time of forward + backward (forward where that is all there is) against T, a panel per number of heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [
        r for r in result["rows"] if "device_us" in r and r["direction"] != "decode" and r["impl"] in ("ours", *PEERS)
    ]
    heads = sorted({r["heads"] for r in rows})
    across = min(2, max(1, len(heads)))
    down = max(1, -(-len(heads) // across))
    figure, axes = plt.subplots(down, across, figsize=(5.6 * across, 3.8 * down), squeeze=False)
    for axis, count in zip(axes.flat, heads, strict=False):
        for op in LABELS:
            for impl, style in (("ours", "-o"), ("fla", "--s"), ("mamba_ssm", ":^")):
                of_op = [r for r in rows if _key(r, "op", "impl", "heads") == (op, impl, count)]
                both = [r for r in of_op if r["direction"] == "fwd_bwd"]
                curve = sorted((r["tokens"], r["device_us"]) for r in both or of_op)
                if curve:
                    label = f"{LABELS[op]}, {impl}{'' if both else ', forward'}"
                    colour = f"C{list(LABELS).index(op)}"
                    axis.plot(*zip(*curve, strict=True), style, label=label, color=colour, markersize=4)
        axis.set(title=f"H = {count}, forward + backward", xlabel="tokens per sequence", ylabel="device time, us")
        axis.set_xscale("log", base=2)
        lengths = sorted({r["tokens"] for r in rows if r["heads"] == count})
        axis.set_xticks(lengths, [f"{tokens:,}" for tokens in lengths])
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
