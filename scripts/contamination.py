"""Which evaluation examples a corpus contains: `python -m scripts.contamination data=NAME tasks=[FOLDER]`.

Compares n-grams of words (13 by default) of task files with the documents of existing token files. Writes
OUT.json and OUT.txt and prints the table.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efla_data.corpus.contamination import contamination_report
from efla_data.corpus.prepare import available_cores

from efla_lm.errors import UserError
from efla_lm.settings import PATH, DataSettings, check_output, entry, key
from scripts.study.checks import expect_at_least
from scripts.study.progress import ProgressLine


@dataclass
class ContaminationSettings:
    """The task files, the token files, and how to compare them."""

    tasks: list[str] = key([], "files, folders or globs of examples (JSON lines, parquet, text)", path=PATH)
    n: int = key(13, "words of an n-gram")
    split: str = key("train", "which documents of the token files", choices=("train", "heldout"))
    processes: int | None = key(None, "worker processes; null: one per core. The result does not depend on it")
    out: str = key("results/contamination-${data.name}", "report, without its suffix", path=PATH)
    data: DataSettings = field(default_factory=DataSettings)


def table(report: dict[str, Any]) -> str:
    """The report as text: a line for each task, followed by its first touched examples."""
    corpus = report["corpus"]
    lines = [
        f"{corpus['folder']} ({corpus['split']}, fingerprint {corpus['fingerprint'][:12]}): "
        f"{corpus['documents']:,} documents, {corpus['words']:,} words",
        f"{report['ngrams_found']:,} of {report['ngrams']:,} {report['n']}-grams of the tasks found, "
        f"in {corpus['documents_touched']:,} documents",
        "",
        f"{'touched':>8} {'of':>7} {'share':>7} {'too short':>10}  file",
    ]
    for task in report["tasks"]:
        checked = task["examples"] - task["too_short"]
        name = Path(task["file"]).name
        lines.append(f"{task['touched']:8,} {checked:7,} {task['share']:7.2%} {task['too_short']:10,}  {name}")
        lines += [
            f"{'':9}record {example['record']}, {example['found']} of {example['ngrams']}: "
            f"{example['words']!r} in document {example['document']}"
            for example in task["first"][:3]
        ]
    return "\n".join(lines) + "\n"


@entry("prepare", ContaminationSettings)
def main(settings: ContaminationSettings) -> None:
    """Report which evaluation examples share n-grams of words with the documents of token files."""
    if not settings.tasks:
        raise UserError("tasks is empty: give the files or folders of evaluation examples, e.g. tasks=[eval/]")
    expect_at_least(settings, 1, "processes")
    line = ProgressLine()

    def show(documents: int) -> None:
        line.show(f"{documents:,} documents, {documents / (time.monotonic() - line.start):,.0f} per second")

    out = Path(settings.out)
    check_output(Path(f"{out}.json"))
    processes = settings.processes or available_cores()
    report = contamination_report(settings.data.dir, settings.tasks, settings.n, settings.split, processes, show)
    line.end()
    Path(f"{out}.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    Path(f"{out}.txt").write_text(table(report), encoding="utf-8")
    print(table(report) + f"{out}.json")


if __name__ == "__main__":
    main()
