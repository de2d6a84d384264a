"""Evaluate a language model: `python eval.py checkpoint=RUN tasks=paper` (all keys: `python eval.py --help`)."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from efla_kernels.environment import commit

from efla_lm.evaluation import checkpoints, hub, results
from efla_lm.evaluation.settings import EvalSettings
from efla_lm.run.output import lasting_output
from efla_lm.settings import check_output, entry, to_dict


@entry("eval", EvalSettings)
def main(settings: EvalSettings) -> int:
    """Evaluate a run, an export or any Hugging Face causal model on lm-eval tasks; write one JSON, print one table.

    Exit code 1 if a task could not be run; the others are still reported.
    """
    from efla_lm.evaluation.harness import HarnessLM
    from efla_lm.evaluation.runner import load_tasks, run_tasks
    from efla_lm.evaluation.scoring import Scorer
    from efla_lm.evaluation.tasks import describe_missing
    from efla_lm.evaluation.tokens import TokenPolicy
    from efla_lm.evaluation.whole_documents import check_recurrent
    from efla_lm.parallel import distributed

    started = time.time()
    settings.check()
    world = distributed.start(settings.device, key="device")
    checkpoint = checkpoints.find(settings.checkpoint)
    if checkpoint.kind == "hub":
        hub.offline_unless_reachable()
    model, tokenizer = checkpoints.load(checkpoint)
    world.on_main(lambda: check_output(out_folder(settings, checkpoint) / "result.json"))
    if settings.carry_state:
        check_recurrent(model)
    weights = checkpoints.weights_hash(model) if world.is_main else ""
    checkpoints.place(model, settings.dtype, world.device)
    task_sets, missing = load_tasks(
        settings.tasks.names,
        tokenizer,
        Path(settings.tasks.local_dir) if settings.tasks.local_dir else None,
        token_dir(settings, checkpoint),
    )
    policy = TokenPolicy(tokenizer, settings.bos, settings.prefix)
    context = settings.context or checkpoints.context_length(model, tokenizer)
    trained = checkpoints.trained_with_bos(checkpoint)
    if trained is not None and trained != policy.prepend_bos and world.is_main:
        print(f"warning: trained with data.bos={trained}, evaluated with {policy.describe()}", file=sys.stderr)
    scorer = Scorer(model, context, settings.rows, world)
    found = run_tasks(
        HarnessLM(scorer, policy),
        task_sets,
        limit=settings.limit,
        num_fewshot=settings.tasks.num_fewshot,
        seed=settings.seed,
        bootstrap=settings.bootstrap,
        carry_state=settings.carry_state,
        report=lambda line: print(line, file=sys.stderr),
    )
    if world.is_main:
        found["missing"] = missing
        found["evaluation"] = {
            "checkpoint": checkpoint.location,
            "step": checkpoint.step,
            "weights_sha256": weights,
            "model": checkpoints.describe_model(checkpoint, model),
            "start_token": policy.describe() | {"trained_with_bos": trained},
            "context": context,
            "dtype": settings.dtype,
            "device": world.device.type if world.device.type == "cpu" else device_name(world.device),
            "processes": world.size,
            "commit": commit(),
            "library_versions": results.versions(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started)),
            "total_seconds": round(time.time() - started, 3),
            "settings": to_dict(settings),
        }
        limited = f", first {settings.limit} documents" if settings.limit else ""
        with lasting_output():  # the table is printed before the file is written: the disk may be full
            results.print_table(found, f"{settings.tasks.name} on {checkpoint.location}{limited}")
        path = results.write(out_folder(settings, checkpoint), f"{settings.tasks.name}-{checkpoint.label}", found)
        print(f"result: {path}")
        for reason in describe_missing(missing):
            print(f"error: {reason}", file=sys.stderr)
    distributed.finish()
    return 1 if missing else 0


def token_dir(settings: EvalSettings, checkpoint: checkpoints.Checkpoint) -> Path | None:
    """Token files of the task heldout, if it is among the tasks."""
    if "heldout" not in settings.tasks.names:
        return None
    return Path(settings.tasks.data_dir) if settings.tasks.data_dir else checkpoints.token_folder(checkpoint)


def out_folder(settings: EvalSettings, checkpoint: checkpoints.Checkpoint) -> Path:
    """Where the result goes: the run that the checkpoint belongs to, else `results/NAME` here."""
    if settings.out:
        return Path(settings.out)
    return checkpoint.run_dir / "results" if checkpoint.run_dir else Path("results") / checkpoint.label


def device_name(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device)


if __name__ == "__main__":
    main()
