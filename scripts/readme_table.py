"""Write the README's table of training speed from its result file: `python -m scripts.readme_table [--check]`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "docs" / "results" / "readme_h200.json"
BEGIN, END = "<!-- python -m scripts.readme_table -->\n", "<!-- end -->"
NAMES = {"efla_lm": "EFLA, efla-lm", "fla": "DeltaNet, fla in flame's set-up"}


def table(result: dict[str, Any]) -> str:
    """Tokens per second, MFU and peak memory of each point, ours beside the peer's, all from one visit to one GPU."""
    about = result["environment"]
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        key = f"{row['size'].replace('1b3', '1.3B').replace('340m', '340M')}, {row['batch']} x {row['tokens']}"
        rows.setdefault(key, {})[row["impl"]] = row
    lines = [
        f"Training on one {about['gpu']}, bf16, torch {about['torch'].partition('+')[0]}, Triton {about['triton']}, "
        f"fla {about['flash-linear-attention']}, commit {about['commit']}; tokens per step as batch x length. "
        f"Raw figures: [{RESULTS.name}]({RESULTS.relative_to(ROOT)}).",
        "",
        "| model, batch | " + " | ".join(f"{name}: tokens/s, MFU, peak" for name in NAMES.values()) + " | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for key, found in rows.items():
        cells = [_cell(found[impl]) if impl in found else "" for impl in NAMES]
        both = all(impl in found for impl in NAMES)
        ratio = found["efla_lm"]["tokens_per_second"] / found["fla"]["tokens_per_second"] if both else None
        lines.append(f"| {key} | {' | '.join(cells)} | {'' if ratio is None else f'{ratio:.2f}'} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_second']:,.0f}, {row['mfu']:.2f}, {row['peak_gib']:.1f} GiB"


def filled(text: str, result: dict[str, Any]) -> str:
    """The README with the table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table(result) + END + after


def main() -> int:
    """Write the table, or with --check exit with 1 where the README differs from the result file."""
    parser = argparse.ArgumentParser(prog="python -m scripts.readme_table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where the README is not current")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    new = filled(text, json.loads(RESULTS.read_text(encoding="utf-8")))
    if check:
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
