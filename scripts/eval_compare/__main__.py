"""Are the numbers lm-eval's own? `python -m scripts.eval_compare checkpoint=RUN/export local_dir=FOLDER`.

The ten tasks of Table 1 on an export, by our evaluation and by lm-eval's stock `hf` model, which loads the same folder
itself. One JSON: every value of both, every task's number of documents beside the official one, and the largest
difference of a request's log-likelihood. Exit code 1 where values or counts differ.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla_kernels.environment import commit
from rich.console import Console
from rich.table import Table

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.evaluation import checkpoints, results
from efla_lm.evaluation.results import PAPER_TASKS
from efla_lm.settings import check_output, entry
from efla_lm.settings.fields import MISSING, PATH, PATH_OR_HUB, key
from scripts.study import result_file


@dataclass
class EvalCompareSettings:
    """All of `python -m scripts.eval_compare`."""

    checkpoint: str = key(MISSING, "export or model folder, or a hub name", path=PATH_OR_HUB)
    local_dir: str | None = key(None, "folder of local copies of the tasks; null: the hub", path=PATH)
    limit: int | None = key(None, "first documents of each task only; null: all")
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    stock_batch_size: int = key(64, "rows per batch of the stock model (its own default is 1)")
    out: str = key("results/eval_compare.json", "result file", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that nothing can be compared with. Called once by `entry`."""
        for name in ("limit", "stock_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected at least 1")


@entry("eval_compare", EvalCompareSettings)
def main(settings: EvalCompareSettings) -> int:
    """Evaluate one export twice, by ours and by lm-eval's stock model, and compare value by value; write one JSON."""
    import torch

    from scripts.eval_compare.run import (
        OFFICIAL_DOCUMENTS,
        compare_values,
        evaluate_ours,
        evaluate_stock,
        largest_differences,
    )
    from scripts.eval_speed import run as speed

    out = Path(settings.out)
    check_output(out)
    device = choose_device(settings.device)
    checkpoint = checkpoints.find(settings.checkpoint)
    if checkpoint.kind == "step":
        raise UserError(f"checkpoint={settings.checkpoint}: the stock model loads exports only; give RUN/export")
    model, tokenizer = checkpoints.load(checkpoint)
    task_sets = speed.tasks(list(PAPER_TASKS), tokenizer, Path(settings.local_dir) if settings.local_dir else None)
    weights, context = checkpoints.weights_hash(model), checkpoints.context_length(model, tokenizer)
    checkpoints.place(model, "fp32", device)
    ours, ours_scores = measure("ours", lambda: evaluate_ours(model, tokenizer, context, task_sets, settings.limit))
    model.cpu()
    stock, stock_scores = measure(
        "stock",
        lambda: evaluate_stock(checkpoint.location, device, task_sets, settings.stock_batch_size, settings.limit),
    )
    rows = compare_values(ours["results"], stock["results"])
    documents = {task: counts["effective"] for task, counts in ours["n-samples"].items()}
    official = documents == OFFICIAL_DOCUMENTS
    agree = all(row["agree"] for row in rows)
    report = {
        "checkpoint": checkpoint.location if checkpoint.kind == "hub" else Path(checkpoint.location).name,
        "weights_sha256": weights,
        "model": checkpoints.describe_model(checkpoint, model),
        "context": context,
        "dtype": "fp32",
        "device": "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "command": result_file.command_line("eval_compare", settings),
        "limit": settings.limit,
        "stock_batch_size": settings.stock_batch_size,
        "documents": documents,
        "official_documents": OFFICIAL_DOCUMENTS,
        "counts_are_official": official,
        "values_agree": agree,
        "values": rows,
        "requests": largest_differences(ours_scores, stock_scores),
        "seconds": {"ours": ours["seconds"], "stock": stock["seconds"]},
        "commit": commit(),
        "library_versions": results.versions(),
    }
    result_file.write(out, report)
    print_comparison(rows, documents)
    print(f"values {'agree' if agree else 'DIFFER'}, counts {'are' if official else 'are NOT'} the official ones")
    print(f"result: {out}")
    return 0 if agree and (official or settings.limit) else 1


def measure(name: str, work: Any) -> Any:
    """`work()`; prints how long it took."""
    start = time.perf_counter()
    found = work()
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    return found


def print_comparison(rows: list[dict[str, Any]], documents: dict[str, int]) -> None:
    """Every value of both."""
    table = Table(title="ours beside lm-eval's stock model", title_justify="left")
    for heading in ("task", "documents", "metric", "ours", "stock", "relative difference"):
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    for row in rows:
        table.add_row(
            row["task"], str(documents[row["task"]]), row["metric"], f"{row['ours']:.6g}", f"{row['stock']:.6g}",
            f"{row['relative_difference']:.1e}", style=None if row["agree"] else "red",
        )  # fmt: skip
    Console(highlight=False, width=140).print(table)


if __name__ == "__main__":
    main()
