"""How fast evaluation is: ours beside lm-eval's stock `hf` model, on the same documents."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from efla_lm.errors import UserError
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.runner import load_tasks, run_any, run_tasks
from efla_lm.evaluation.scoring import Scorer
from efla_lm.evaluation.tasks import TaskSet, describe_missing
from efla_lm.evaluation.tokens import TokenPolicy

Run = Callable[[TaskSet, int | None], dict[str, Any]]


def fla_delta_net(vocab_size: int, hidden_size: int, num_heads: int, layers: int, context: int) -> Any:
    """An untrained DeltaNet of flash-linear-attention with its own widths, as its public configurations have them."""
    from fla.models import DeltaNetConfig, DeltaNetForCausalLM

    torch.manual_seed(0)
    config = DeltaNetConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_hidden_layers=layers,
        max_position_embeddings=context,
    )
    return DeltaNetForCausalLM(config)


def tasks(names: list[str], tokenizer: Any, folder: Path | None) -> list[TaskSet]:
    """The tasks to be timed. Raises UserError if one is missing."""
    found, missing = load_tasks(names, tokenizer, folder, keys=("tasks", "local_dir"))
    if missing:
        raise UserError("; ".join(describe_missing(missing)))
    return found


def ours(model: Any, tokenizer: Any, context: int) -> Run:
    """Our evaluation of a task set's first documents (None: all), without resampled errors."""
    harness = HarnessLM(Scorer(model, context, "auto"), TokenPolicy(tokenizer))
    return lambda task_set, limit: run_tasks(harness, [task_set], limit=limit, bootstrap=0)


def stock(model: Any, tokenizer: Any, context: int, batch_size: int) -> Run:
    """The same by lm-eval's stock `hf` model."""
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=context)
    return lambda task_set, limit: run_any(harness, [task_set], limit=limit)


def timed(run: Run, task_set: TaskSet, limit: int | None, warm: bool) -> dict[str, Any]:
    """`seconds` and `results` of one run; with `warm` of the second of two equal ones, and `first_seconds`.

    By the second run every batch's shape has been compiled and tuned for; fla's kernels are tuned anew for many shapes.
    """
    start = time.perf_counter()
    found = run(task_set, limit)
    first = round(time.perf_counter() - start, 3)
    if not warm:
        return {"seconds": first, "results": found["results"]}
    start = time.perf_counter()
    found = run(task_set, limit)
    seconds = round(time.perf_counter() - start, 3)
    return {"seconds": seconds, "first_seconds": first, "results": found["results"]}
