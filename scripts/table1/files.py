"""Table 1 as Markdown, CSV and LaTeX.

A model takes several lines: our values, their standard errors, their spread over seeds where there are several, the
paper's values, and ours minus the paper's. What is not there is shown as missing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from efla_lm.models.rules import RULES
from scripts.study.table import MISSING, number
from scripts.table1.table import AVERAGE, HEADINGS, ModelRow, Value

NONE = "-"  # there is nothing to show by nature: word perplexity has no standard error
SIZES = {"340m": "340M", "1b3": "1.3B"}


def label(row: ModelRow) -> str:
    """`340M EFLA`."""
    return " ".join(
        filter(
            None, (SIZES.get(row.size or "", row.size), RULES[row.family].label if row.family in RULES else row.family)
        )
    )


def digits(heading: str) -> int:
    """Decimals of a column: perplexities with two, accuracies with one, as in the paper."""
    return 2 if heading.endswith("ppl") else 1


def printed_beside(row: ModelRow) -> str | None:
    """The paper's printed average, where it is not the mean of its nine accuracies."""
    if row.paper is None or f"{row.paper.average:.1f}" == f"{row.paper.printed_average:.1f}":
        return None
    return f"{row.paper.printed_average:.1f}"


def lines(row: ModelRow) -> list[tuple[str, list[str]]]:
    """(what the line holds, one text per heading) of a model."""
    seeds = len(row.members)
    found = [("ours" if seeds == 1 else f"ours, mean of {seeds}", [_ours(row.values[h], h) for h in HEADINGS])]
    found.append(("std error", [_number(v.error if (v := row.values[h]) else None, h) for h in HEADINGS]))
    if seeds > 1:
        found.append(("spread", [_number(v.spread if (v := row.values[h]) else None, h) for h in HEADINGS]))
    paper = [_number(_paper(row, h), h, MISSING) for h in HEADINGS]
    if printed := printed_beside(row):
        paper[-1] += f" (printed {printed})"
    found.append(("paper", paper))
    found.append(("difference", [_number(_difference(row, h), h, MISSING, sign=True) for h in HEADINGS]))
    return found


def _paper(row: ModelRow, heading: str) -> float | None:
    if row.paper is None:
        return None
    return row.paper.average if heading == AVERAGE else row.paper.values[heading]


def _difference(row: ModelRow, heading: str) -> float | None:
    ours, paper = row.values[heading], _paper(row, heading)
    return None if ours is None or paper is None else ours.value - paper


def _ours(value: Value | None, heading: str) -> str:
    if value is None:
        return MISSING
    return number(value.value, digits(heading)) + ("*" if value.limit is not None else "")


def _number(value: float | None, heading: str, absent: str = NONE, sign: bool = False) -> str:
    return absent if value is None else number(value, digits(heading), sign)


def notes(rows: Sequence[ModelRow], source: str) -> list[str]:
    """What a reader must know beside the numbers."""
    found = [
        f"Paper: {source}. Averages are means of the nine accuracies; a printed one stands beside where it differs.",
        "Accuracies in percent; acc_n is length-normalised; perplexities: lower is better.",
    ]
    if limits := sorted({v.limit for row in rows for v in row.values.values() if v and v.limit is not None}):
        found.append(f"* on the first {', '.join(map(str, limits))} documents of each task only: not to be reported.")
    for row in rows:
        short = [h for h in HEADINGS if (v := row.values[h]) and v.seeds < len(row.members)]
        if short:
            found.append(f"{label(row)}: not all of its {len(row.members)} runs have {', '.join(short)}.")
        for member in row.members:
            step = "" if member.step is None else f", step {member.step}"
            seed = "" if member.seed is None else f", seed {member.seed}"
            found.append(f"{label(row)}: {member.name}{step}{seed}")
    return found


def markdown(rows: Sequence[ModelRow], source: str) -> str:
    """The table with columns of even width, which reads as text too, and its notes."""
    table = [["model", "", *HEADINGS]]
    for row in rows:
        for place, (what, texts) in enumerate(lines(row)):
            table.append([label(row) if place == 0 else "", what, *texts])
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    rule = [":" + "-" * (widths[i] - 1) if i < 2 else "-" * (widths[i] - 1) + ":" for i in range(len(widths))]

    def shown(line: list[str]) -> str:
        cells = [text.ljust(w) if i < 2 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths))]
        return f"| {' | '.join(cells)} |"

    text = "\n".join([shown(table[0]), shown(rule), *map(shown, table[1:])])
    return text + "\n\n" + "\n".join(f"- {note}" for note in notes(rows, source)) + "\n"


def csv_text(rows: Sequence[ModelRow]) -> str:
    """One line per model and column, unrounded; an empty field is missing."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["size", "family", "column", "value", "standard_error", "spread", "runs", "limit", "paper", "paper_printed",
         "difference"]
    )  # fmt: skip
    for row in rows:
        for heading in HEADINGS:
            ours = (
                [v.value, v.error, v.spread, v.seeds, v.limit] if (v := row.values[heading]) else [*[None] * 3, 0, None]
            )
            printed = row.paper.printed_average if row.paper and heading == AVERAGE else None
            fields = [row.size, row.family, heading, *ours, _paper(row, heading), printed, _difference(row, heading)]
            writer.writerow(["" if field is None else field for field in fields])
    return stream.getvalue()


def latex(rows: Sequence[ModelRow], source: str) -> str:
    r"""A `tabular` for `\usepackage{booktabs}`, notes as comments."""
    heads = " & ".join(heading.replace("acc_n", "acc$_n$") for heading in HEADINGS)
    parts = [f"% {note}" for note in notes(rows, source)]
    parts += [r"\begin{tabular}{ll" + "r" * len(HEADINGS) + "}", r"\toprule", f"model & & {heads} \\\\"]
    for row in rows:
        parts.append(r"\midrule")
        for place, (what, texts) in enumerate(lines(row)):
            name = label(row).replace("_", r"\_") if place == 0 else ""
            cells = " & ".join(_signed(text) for text in texts)
            parts.append(f"{name} & {what} & {cells} \\\\")
    return "\n".join([*parts, r"\bottomrule", r"\end{tabular}", ""])


def _signed(text: str) -> str:
    return f"${text}$" if text.startswith(("+", "-")) and len(text) > 1 else text.replace(NONE, "--")
