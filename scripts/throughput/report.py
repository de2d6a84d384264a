"""The throughput file as a table for a README and as a plot after the paper's Figure 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.throughput.forecast import forecasts, off_by

LABELS = {
    "efla": "EFLA", "gated_efla": "Gated EFLA", "deltanet": "DeltaNet", "gated_deltanet": "Gated DeltaNet",
    "mamba2": "Mamba-2", "transformer": "Transformer",
}  # fmt: skip
IMPLEMENTATIONS = {"efla_lm": "", "fla": " (fla)"}
BASELINE = ("deltanet", "fla")  # what the paper's models are compared with: its fastest rule of this kind

Row = dict[str, Any]


def shape(row: Row) -> str:
    """`8x2048`, and the number of GPUs where there are several."""
    return f"{row['batch']}x{row['tokens']}" + (f", {row['gpus']} GPUs {row['parallel']}" if row["gpus"] > 1 else "")


def name(row: Row) -> str:
    """The model, whose it is, and how it differs from the defaults."""
    options = f" [{' '.join(row['options'])}]" if row["options"] else ""
    return LABELS[row["model"]] + IMPLEMENTATIONS[row["impl"]] + options


def grid(rows: list[Row]) -> tuple[list[str], dict[str, dict[str, Row]]]:
    """The shapes in order, and the rows by name and shape."""
    order = {shape(r): (r["gpus"], r["batch"] * r["tokens"], r["tokens"], r["parallel"]) for r in rows}
    by_name: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda r: (list(LABELS).index(r["model"]), r["impl"] != "efla_lm", r["options"])):
        by_name.setdefault(name(row), {})[shape(row)] = row
    return sorted(order, key=lambda s: order[s]), by_name


def markdown(result: dict[str, Any]) -> str:
    """One table per size: tokens per second, MFU, peak memory and start-up; then the ratios to fla's DeltaNet."""
    about = result["environment"]
    versions = ", ".join(f"{part} {about[part]}" for part in ("driver", "torch", "triton", "flash-linear-attention"))
    lines = [
        f"{about['gpu'] or 'CPU'}, {versions}. In a cell: thousand tokens/s, MFU (6 FLOPs per parameter but an untied "
        "embedding's), peak GiB, seconds from the start of the process to the end of the fourth update."
    ]
    measured = [r for r in result["rows"] if "skipped" not in r]
    for size in sorted({r["size"] for r in measured}, key=lambda s: (s != "340m", s)):
        shapes, by_name = grid([r for r in measured if r["size"] == size])
        lines += ["", f"**{size}**", "", f"| | {' | '.join(shapes)} |", "|---" * (len(shapes) + 1) + "|"]
        for label, found in by_name.items():
            cells = [cell(found[s]) if s in found else "" for s in shapes]
            lines.append(f"| {label} | {' | '.join(cells)} |")
        lines += ["", *ratio_lines([r for r in measured if r["size"] == size])]
    skipped = [r for r in result["rows"] if "skipped" in r]
    lines += ["", *(f"- {r['size']} {name(r)} {shape(r)}: {r['skipped']}" for r in skipped)]
    return "\n".join(lines).rstrip() + "\n"


def forecast_table(path: Path, result: dict[str, Any]) -> str:
    """What `scripts.plan` says of each point of ours beside what was measured; empty where it knows no such device."""
    found = forecasts(path, result)
    if not found:
        return ""
    lines = [
        "Forecast by `scripts.plan` and by how much it is above what was measured; speed without the row itself.", "",
        "| | | | GiB | forecast | | tokens/s | forecast | its time | it goes by |", "|---" * 10 + "|",
    ]  # fmt: skip
    for entry in found:
        row = entry["row"]
        memory = f"{row['peak_gib']:.1f} | {entry['peak_gib']:.1f} | {off_by(entry['peak_gib'], row['peak_gib'])}"
        speed = f"{row['tokens_per_second']:,.0f} | {entry['rate']:,.0f}"
        time = off_by(row["tokens_per_second"], entry["rate"])
        lines.append(
            f"| {row['size']} | {name(row)} | {shape(row)} | {memory} | {speed} | {time} | {entry['source']} |"
        )
    return "\n".join(lines) + "\n"


def cell(row: Row) -> str:
    """Thousands of tokens per second, MFU, peak memory and start-up of a point."""
    mfu = "" if row["mfu"] is None else f", {row['mfu']:.2f}"
    warm = "" if row["caches"] == "empty" else " warm"
    return f"{row['tokens_per_second'] / 1e3:.1f}{mfu}, {row['peak_gib']:.1f} GiB, {row['startup_s']:.0f} s{warm}"


def ratio_lines(rows: list[Row]) -> list[str]:
    """Ours against fla's DeltaNet where both ran at one size: speed, memory, start-up; against our EFLA; and several
    GPUs against one, with the time when nothing but communication runs, or nothing at all, where it was traced."""
    lines = []
    base: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: len(r["options"])):
        if (row["model"], row["impl"]) == BASELINE:
            base.setdefault(shape(row), []).append(row)
    efla = {shape(r): r for r in rows if (r["model"], r["impl"], r["options"]) == ("efla", "efla_lm", [])}
    for row in rows:
        if row["impl"] != "efla_lm":
            continue
        parts = []
        for other in base.get(shape(row), []):
            speed = row["tokens_per_second"] / other["tokens_per_second"]
            memory, start = row["peak_gib"] / other["peak_gib"], row["startup_s"] / other["startup_s"]
            theirs = "".join(f" [{option}]" for option in other["options"])
            parts.append(
                f"{speed:.2f}x fla's DeltaNet{theirs} with {memory:.2f} of its memory and {start:.2f} of its start-up"
                f"{apart(row, other)}"
            )
        if (ours := efla.get(shape(row))) is not None and row is not ours:
            share = row["tokens_per_second"] / ours["tokens_per_second"]
            parts.append(f"{share:.3f} of EFLA's speed{apart(row, ours)}")
        one = [r for r in rows if (r["gpus"], point(r)) == (1, point(row))]
        if row["gpus"] > 1 and one:
            each = row["tokens_per_second"] / row["gpus"] / one[0]["tokens_per_second"]
            where = row.get("where")
            traced = where and (
                f", of {where['span']:.1f} ms traced {where['exposed communication']:.1f} communication alone and "
                f"{where['idle']:.1f} nothing"
            )
            parts.append(
                f"{each:.3f} of one GPU's speed each{apart(row, one[0])}, {row['peak_gib']:.1f} GiB each{traced or ''}"
            )
        if parts:
            lines.append(f"- {name(row)} {shape(row)}: {'; '.join(parts)}")
    return lines


def apart(row: Row, other: Row) -> str:
    """A remark where two rows were not measured at one commit: then not on one GPU either, nor with the same code."""
    if row.get("commit") == other.get("commit"):
        return ""
    return f" (apart: {row.get('commit')}, {other.get('commit')})"


def point(row: Row) -> tuple[Any, ...]:
    """What a device does in a point, whatever the others do."""
    options = [option for option in row["options"] if not option.startswith("parallel.")]
    return row["model"], row["size"], row["impl"], row["batch"], row["tokens"], options


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of thousand tokens/s of each GPU by shape and model, a panel per size, as in the paper's Figure 4.

    A model's bars share a colour, fla's are hatched, and those with options are paler.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = [r for r in result["rows"] if "skipped" not in r]
    sizes = sorted({r["size"] for r in measured}, key=lambda s: (s != "340m", s))
    figure, axes = plt.subplots(max(1, len(sizes)), 1, figsize=(11, 3.6 * max(1, len(sizes))), squeeze=False)
    for axis, size in zip(axes[:, 0], sizes):
        shapes, by_name = grid([r for r in measured if r["size"] == size])
        counts = {s: sum(s in found for found in by_name.values()) for s in shapes}
        width, drawn = 0.9 / max(counts.values()), dict.fromkeys(shapes, 0)
        for label, found in by_name.items():
            places = [shapes.index(s) + (drawn[s] - (counts[s] - 1) / 2) * width for s in found]
            heights = [r["tokens_per_second"] / r["gpus"] / 1e3 for r in found.values()]
            row = next(iter(found.values()))
            axis.bar(
                places, heights, width, label=label, color=f"C{list(LABELS).index(row['model'])}",
                alpha=0.55 if row["options"] else 1.0, hatch=None if row["impl"] == "efla_lm" else "///",
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            for s in found:
                drawn[s] += 1
        axis.set(title=f"{size}, {result['environment']['gpu'] or 'CPU'}", ylabel="thousand tokens/s of each GPU")
        axis.set_xticks(range(len(shapes)), [s.replace(", ", "\n").replace("GPUs ", "GPUs\n") for s in shapes])
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
