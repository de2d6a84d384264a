"""How long evaluation takes: `python -m scripts.eval_speed tokenizer=FOLDER local_dir=FOLDER`.

Measurements of untrained models, for which the work is the same as for trained ones:
* `full`: `eval.py tasks=paper` on an EFLA, from start to end of the command; with gpus=N also `several`: the same on N
  processes that share the documents, how much faster, and whether the numbers are those of one process;
* `comparison`: the first `limit` documents of each of `tasks`, our evaluation of an EFLA and of fla's DeltaNet beside
  lm-eval's stock `hf` model over the same DeltaNet, tokenising included; with `warm` each task runs twice and the
  second run counts, else once with everything that a command compiles and tunes on its way.
The result file is written after every part, so that what is measured stays if a later part fails.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from efla_kernels.environment import commit

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.evaluation import checkpoints, results
from efla_lm.models import EflaConfig, EflaForCausalLM, initialise
from efla_lm.models.pretrained import load_tokenizer
from efla_lm.settings import TrainSettings, check_output, compose, entry
from scripts.eval_compare.run import compare_values
from scripts.eval_speed.settings import EvalSpeedSettings
from scripts.study import result_file
from scripts.study.launcher import python, timed_command

CONTEXT = 2048


@entry("eval_speed", EvalSpeedSettings)
def main(settings: EvalSpeedSettings) -> int:
    """Time our evaluation on the ten tasks, and beside lm-eval's stock model over fla's DeltaNet; write one JSON."""
    device = choose_device(settings.device)
    if settings.stock and device.type != "cuda":
        raise UserError("stock=true needs a GPU, which fla's kernels run on: set stock=false here")
    if device.type == "cuda" and settings.gpus > torch.cuda.device_count():
        raise UserError(f"gpus={settings.gpus}: this machine has {torch.cuda.device_count()}")
    out = Path(settings.out)
    check_output(out)
    tokenizer = load_tokenizer(settings.tokenizer, local=Path(settings.tokenizer).exists())
    recipe = compose("train", [f"size={settings.size}", f"model.vocab_size={len(tokenizer)}"], TrainSettings)
    config = EflaConfig(**asdict(recipe.model) | {"max_position_embeddings": CONTEXT})
    model = EflaForCausalLM(config).eval()
    initialise(model, 0)
    report: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "command": result_file.command_line("eval_speed", settings),
        "size": settings.size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": settings.dtype,
        "commit": commit(),
        "library_versions": results.versions(),
    }

    def save(part: str, found: dict[str, Any]) -> None:
        report[part] = found
        result_file.write(out, report)

    if settings.full:
        with tempfile.TemporaryDirectory() as folder:
            export = Path(folder) / "export"
            model.save_pretrained(export)
            tokenizer.save_pretrained(export)
            one = time_command(settings, export, 1)
            save("full", one)
            print(f"eval.py: {one['seconds']:.1f} s", flush=True)
            if settings.gpus > 1:
                several = time_command(settings, export, settings.gpus)
                save("several", several | beside_one(several, one))
                print(f"eval.py on {settings.gpus} processes: {several['seconds']:.1f} s", flush=True)
    for found in compare(settings, model, config, tokenizer, device):
        save("comparison", found)
    print(f"result: {out}")
    return 0


def time_command(settings: EvalSpeedSettings, export: Path, processes: int) -> dict[str, Any]:
    """Seconds of `eval.py tasks=paper` on an export, by task and from start to end, and its numbers."""
    out = export.parent / f"results-{processes}"
    command = [
        *python(processes), "eval.py", f"checkpoint={export}", "tasks=paper", f"dtype={settings.dtype}",
        f"device={settings.device}", f"out={out}",
    ]  # fmt: skip
    if settings.local_dir:
        command.append(f"tasks.local_dir={settings.local_dir}")
    if settings.full_limit:
        command.append(f"limit={settings.full_limit}")
    code, seconds = timed_command(command)
    if code != 0:
        raise UserError(f"eval.py ended with exit code {code}")
    (path,) = out.glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    documents = {task: counts["effective"] for task, counts in found["n-samples"].items()}
    return {
        "processes": found["evaluation"]["processes"],
        "seconds": round(seconds, 3),
        "seconds_by_task": found["seconds"],
        "documents": documents,
        "results": found["results"],
    }


def beside_one(several: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """How much faster than one process, in all and in the tasks alone, and the numbers that are not equal."""
    rows = compare_values(several["results"], one["results"])
    tasks, alone = (sum(found["seconds_by_task"].values()) for found in (several, one))
    return {
        "times_faster": round(one["seconds"] / several["seconds"], 3),
        "times_faster_in_tasks": round(alone / tasks, 3),
        "numbers": len(rows),
        "unequal": [
            {"task": row["task"], "metric": row["metric"], "several": row["ours"], "one": row["stock"]}
            for row in rows
            if row["relative_difference"]
        ],
    }


def compare(
    settings: EvalSpeedSettings, model: EflaForCausalLM, config: EflaConfig, tokenizer: Any, device: Any
) -> Iterator[dict[str, Any]]:
    """Seconds by task and implementation, their sums, and the ratios to the stock model; yields after every task."""
    from scripts.eval_speed import run as speed

    task_sets = speed.tasks(settings.tasks, tokenizer, Path(settings.local_dir) if settings.local_dir else None)
    checkpoints.place(model, settings.dtype, device)
    runs = {"ours_efla": speed.ours(model, tokenizer, CONTEXT)}
    if settings.stock:
        shape = (config.vocab_size, config.hidden_size, config.num_heads, config.num_hidden_layers)
        theirs = checkpoints.place(speed.fla_delta_net(*shape, CONTEXT).eval(), settings.dtype, device)
        runs["stock_fla_deltanet"] = speed.stock(theirs, tokenizer, CONTEXT, settings.stock_batch_size)
        runs["ours_fla_deltanet"] = speed.ours(theirs, tokenizer, CONTEXT)
    tasks: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {
        "limit": settings.limit, "warm": settings.warm, "stock_batch_size": settings.stock_batch_size, "tasks": tasks,
    }  # fmt: skip
    for name, task_set in zip(settings.tasks, task_sets, strict=True):
        tasks[name] = {impl: speed.timed(run, task_set, settings.limit, settings.warm) for impl, run in runs.items()}
        line = ", ".join(f"{impl} {row['seconds']:.1f} s" for impl, row in tasks[name].items())
        print(f"{name}: {line}", flush=True)
        totals = {impl: round(sum(task[impl]["seconds"] for task in tasks.values()), 3) for impl in runs}
        found["seconds"] = totals
        if settings.stock:
            peer = totals["stock_fla_deltanet"]
            found["times_faster"] = {i: round(peer / t, 2) for i, t in totals.items() if i.startswith("ours")}
        yield found
    print(f"seconds: {found['seconds']}, times faster than stock: {found.get('times_faster')}", flush=True)


if __name__ == "__main__":
    main()
