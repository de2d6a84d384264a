"""The paper's Table 1 beside ours: `python -m scripts.table1 runs=[runs/A,runs/B]`.

Each of `runs` is a run directory (its `results/*.json`, as `eval.py` writes them), a folder of result files, or one
file. Writes table1.md, table1.csv and table1.tex and prints the first.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from efla_lm.errors import UserError
from efla_lm.settings import entry
from efla_lm.settings.fields import PATH, key
from scripts.table1 import files as table1_files
from scripts.table1 import table as table1


@dataclass
class Table1Settings:
    """All of `python -m scripts.table1`."""

    runs: list[str] = key(  # noqa: RUF009  (returns a dataclasses.field)
        [], "run directories, folders of result files, or result files", path=PATH
    )
    out: str = key("results/table1", "folder of table1.md, table1.csv and table1.tex", path=PATH)


@entry("table1", Table1Settings)
def main(settings: Table1Settings) -> int:
    """Build the paper's Table 1 from the results of runs: ours, standard error, the paper's value, the difference."""
    if not settings.runs:
        raise UserError("runs: expected at least one run directory, e.g. runs=[runs/efla-340m,runs/deltanet-340m]")
    source, paper = table1.read_paper()
    runs = {run: table1.read_run(run) for run in settings.runs}
    rows = table1.build(list(runs.values()), paper)
    out = Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    text = table1_files.markdown(rows, source)
    files = {"md": text, "csv": table1_files.csv_text(rows), "tex": table1_files.latex(rows, source)}
    for suffix, content in files.items():
        (out / f"table1.{suffix}").write_text(content, encoding="utf-8")
    print(text)
    print(f"written: {out}/table1.md, .csv, .tex")
    for run, evaluation in runs.items():
        if not evaluation.values:
            print(f"warning: no result in {run}: python eval.py checkpoint={run} tasks=paper", file=sys.stderr)
    return 0


if __name__ == "__main__":
    main()
