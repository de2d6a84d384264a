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
from efla_lm.evaluation.tasks import TaskSet
from efla_lm.evaluation.tokens import TokenPolicy


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
    found, missing = load_tasks(names, tokenizer, folder)
    if missing:
        raise UserError("; ".join(missing.values()))
    return found


def ours(model: Any, tokenizer: Any, context: int, task_sets: list[TaskSet], limit: int) -> dict[str, Any]:
    """Seconds and results of our evaluation of `limit` documents per task, cold and warm."""
    harness = HarnessLM(Scorer(model, context, "auto"), TokenPolicy(tokenizer))
    return _twice(lambda: run_tasks(harness, task_sets, limit=limit, bootstrap=0))


def stock(
    model: Any, tokenizer: Any, context: int, task_sets: list[TaskSet], limit: int, batch_size: int
) -> dict[str, Any]:
    """The same of lm-eval's stock `hf` model."""
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=context)
    return _twice(lambda: run_any(harness, task_sets, limit=limit))


def _twice(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """`seconds` of the second of two equal runs: by then every batch's shape has been compiled and tuned for.

    `first_seconds` is what a user waits for the first time; fla's kernels are tuned anew for many shapes.
    """
    start = time.perf_counter()
    run()
    between = time.perf_counter()
    found = run()
    return {
        "seconds": round(time.perf_counter() - between, 3),
        "first_seconds": round(between - start, 3),
        "seconds_by_task": found["seconds"],
        "results": found["results"],
    }
