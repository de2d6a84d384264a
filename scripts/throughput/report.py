"""The throughput file as a table for a README and as a plot after the paper's Figure 4."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from scripts.study import table
from scripts.study.plot import colour, label, new_figure, save_figure
from scripts.throughput.forecast import forecasts, off_by
from scripts.throughput.settings import MODELS

BASELINE = ("deltanet", "fla")  # what the paper's models are compared with: its fastest rule of this kind

Row = dict[str, Any]


def shape(row: Row) -> str:
    """`8x2048`, and the number of GPUs where there are several."""
    return f"{row['batch']}x{row['tokens']}" + (f", {row['gpus']} GPUs {row['parallel']}" if row["gpus"] > 1 else "")


def name(row: Row) -> str:
    """The model, `(fla)` for fla's, and how it differs from the defaults."""
    options = f" [{' '.join(row['options'])}]" if row["options"] else ""
    return label(row["model"]) + (" (fla)" if row["impl"] == "fla" else "") + options


def grid(rows: list[Row]) -> tuple[list[str], dict[str, dict[str, Row]]]:
    """The shapes in order, and the rows by name and shape."""
    order = {shape(r): (r["gpus"], r["batch"] * r["tokens"], r["tokens"], r["parallel"]) for r in rows}
    by_name: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda r: (MODELS.index(r["model"]), r["impl"] != "efla_lm", r["options"])):
        by_name.setdefault(name(row), {})[shape(row)] = row
    return sorted(order, key=lambda s: order[s]), by_name


def by_size(rows: list[Row]) -> dict[str, list[Row]]:
    """The rows with figures by size, 340M first."""
    measured = [r for r in rows if "skipped" not in r]
    sizes = sorted({r["size"] for r in measured}, key=lambda s: (s != "340m", s))
    return {size: [r for r in measured if r["size"] == size] for size in sizes}


def markdown(result: dict[str, Any]) -> str:
    """One table per size: tokens per second, MFU, peak memory and start-up; then the ratios to fla's DeltaNet."""
    about = result["environment"]
    versions = ", ".join(f"{part} {about[part]}" for part in ("driver", "torch", "triton", "flash-linear-attention"))
    parts = [
        f"{about['gpu'] or 'CPU'}, {versions}. In a cell: thousand tokens/s, MFU (6 FLOPs per parameter but an untied "
        "embedding's), peak GiB, seconds from the start of the process to the end of the fourth step."
    ]
    for size, rows in by_size(result["rows"]).items():
        shapes, by_name = grid(rows)
        cells = [[text, *(cell(found[s]) if s in found else "" for s in shapes)] for text, found in by_name.items()]
        parts += [f"**{size}**", table.markdown(["", *shapes], cells), "\n".join(ratio_lines(rows))]
    skipped = [r for r in result["rows"] if "skipped" in r]
    parts.append("\n".join(f"- {r['size']} {name(r)} {shape(r)}: {r['skipped']}" for r in skipped))
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def forecast_table(path: Path, result: dict[str, Any]) -> str:
    """What `scripts.plan` says of each point of ours beside what was measured; empty where it knows no such device."""
    rows = []
    for entry in forecasts(path, result):
        row, peak, rate = entry["row"], entry["peak_gib"], entry["rate"]
        memory = [f"{row['peak_gib']:.1f}", f"{peak:.1f}", off_by(peak, row["peak_gib"])]
        speed = [f"{row['tokens_per_second']:,.0f}", f"{rate:,.0f}", off_by(row["tokens_per_second"], rate)]
        rows.append([row["size"], name(row), shape(row), *memory, *speed, entry["source"]])
    if not rows:
        return ""
    head = "Forecast by `scripts.plan` and by how much it is above what was measured; speed without the row itself."
    columns = ["", "", "", "GiB", "forecast", "", "tokens/s", "forecast", "its time", "it goes by"]
    return f"{head}\n\n{table.markdown(columns, rows)}"


def cell(row: Row) -> str:
    """Thousands of tokens per second, MFU, peak memory and start-up of a point."""
    mfu = "" if row["mfu"] is None else f", {row['mfu']:.2f}"
    warm = "" if row["caches"] == "empty" else " warm"
    return f"{row['tokens_per_second'] / 1e3:.1f}{mfu}, {row['peak_gib']:.1f} GiB, {row['startup_s']:.0f} s{warm}"


def ratio_lines(rows: list[Row]) -> list[str]:
    """Rows of ours against others of one size: against fla's DeltaNet (speed, memory, start-up), against our EFLA, and
    several GPUs against one, with the time of communication alone and of nothing where it was traced."""
    lines = []
    efla = {shape(r): r for r in rows if (r["model"], r["impl"], r["options"]) == ("efla", "efla_lm", [])}
    for row in (r for r in rows if r["impl"] == "efla_lm"):
        parts = []
        peers = [r for r in rows if (r["model"], r["impl"]) == BASELINE and shape(r) == shape(row)]
        for other in sorted(peers, key=lambda r: len(r["options"])):
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
        one = [r for r in rows if r["gpus"] == 1 and work_of_a_device(r) == work_of_a_device(row)]
        if row["gpus"] > 1 and one:
            each = row["tokens_per_second"] / row["gpus"] / one[0]["tokens_per_second"]
            where, traced = row.get("where"), ""
            if where:
                alone = where["exposed communication"]
                traced = f", of {where['span']:.1f} ms traced {alone:.1f} communication alone, {where['idle']:.1f} idle"
            parts.append(
                f"{each:.3f} of one GPU's speed each{apart(row, one[0])}, {row['peak_gib']:.1f} GiB each{traced}"
            )
        if parts:
            lines.append(f"- {name(row)} {shape(row)}: {'; '.join(parts)}")
    return lines


def apart(row: Row, other: Row) -> str:
    """A remark where two rows were not measured at one commit: then with other code, and often on another GPU."""
    if row.get("commit") == other.get("commit"):
        return ""
    return f" (apart: {row.get('commit')}, {other.get('commit')})"


def work_of_a_device(row: Row) -> tuple[Any, ...]:
    """What one device does in a point, however many there are."""
    options = [option for option in row["options"] if not option.startswith("parallel.")]
    return row["model"], row["size"], row["impl"], row["batch"], row["tokens"], options


def one_visit(rows: list[Row]) -> list[Row]:
    """The rows that one figure can show beside each other: measured, default options, of the commit that has most.

    Shapes in which nothing of ours was measured are left out.
    """
    plain = [r for r in rows if "skipped" not in r and not r["options"]]
    counts = Counter(r.get("commit") for r in plain)
    visit = [r for r in plain if r.get("commit") == counts.most_common(1)[0][0]]
    ours = {(r["size"], shape(r)) for r in visit if r["impl"] == "efla_lm"}
    return [r for r in visit if (r["size"], shape(r)) in ours]


def plot(result: dict[str, Any], path: Path) -> int:
    """Bars of thousand tokens/s of each GPU by shape and model, a panel per size, as in the paper's Figure 4.

    All bars are of one visit (`one_visit`); returns how many rows with figures are left out. fla's bars are hatched.
    """
    drawn = one_visit(result["rows"])
    panels = by_size(drawn)
    figure, axes = new_figure(max(1, len(panels)), 1, width=9, height=3.2)
    for axis, (size, rows) in zip(axes[:, 0], panels.items()):
        shapes, by_name = grid(rows)
        counts = Counter(s for found in by_name.values() for s in found)
        width, before = 0.9 / max(counts.values()), Counter[str]()
        for text, found in by_name.items():
            row = next(iter(found.values()))
            places = [shapes.index(s) + (before[s] - (counts[s] - 1) / 2) * width for s in found]
            heights = [r["tokens_per_second"] / r["gpus"] / 1e3 for r in found.values()]
            hatch = "///" if row["impl"] == "fla" else None
            axis.bar(places, heights, width, label=text, color=colour(row["model"]), hatch=hatch, edgecolor="white")
            before.update(list(found))
        about = f"{size}, {result['environment']['gpu'] or 'CPU'}, commit {rows[0].get('commit')}"
        axis.set(title=about, ylabel="thousand tokens/s of each GPU")
        axis.set_xticks(range(len(shapes)), [s.replace(", ", "\n").replace("GPUs ", "GPUs\n") for s in shapes])
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path, pdf=False)
    return sum("skipped" not in r for r in result["rows"]) - len(drawn)
