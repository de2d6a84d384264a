"""Load tasks and run them on a model: for `eval.py`, and for a model in training (`live`)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from lm_eval import utils as harness_utils
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from efla_lm.evaluation import heldout, hub, whole_documents
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.tasks import MissingTask, TaskSet, load_from_hub, load_local, manager_for

MERGED = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")


def load_tasks(
    names: list[str],
    tokenizer: Any,
    local_dir: Path | None = None,
    token_dir: Path | None = None,
    keys: tuple[str, str] = ("tasks.names", "tasks.local_dir"),
) -> tuple[list[TaskSet], dict[str, str]]:
    """(task sets in order, {name: reason} of tasks that cannot be loaded).

    names: lm-eval tasks, groups or tags, and `heldout`. local_dir: folder of local copies, or None for the hub.
    token_dir: token files of `heldout`. keys: the settings of names and local_dir, for error messages.

    Raises:
        UserError: lm-eval knows no task of that name.
    """
    stock = [name for name in dict.fromkeys(names) if name != heldout.NAME]
    if local_dir is None and stock:
        hub.offline_unless_reachable()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    manager = manager_for(stock, keys[0]) if stock else None
    found: list[TaskSet] = []
    missing: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            if name == heldout.NAME:
                if token_dir is None:
                    raise MissingTask(f"task {name}: no folder of token files is known; give tasks.data_dir=FOLDER")
                found.append(heldout.load_heldout(token_dir, tokenizer))
            else:
                assert manager is not None
                task_set = (
                    load_local(manager, name, local_dir, keys[1])
                    if local_dir
                    else load_from_hub(manager, name, keys[1])
                )
                found.append(task_set)
        except MissingTask as error:
            missing[name] = str(error)
    return found, missing


def run_tasks(
    model: HarnessLM,
    task_sets: list[TaskSet],
    *,
    limit: int | None = None,
    num_fewshot: int = 0,
    seed: int = 1234,
    bootstrap: int = 1000,
    carry_state: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Evaluate and return lm-eval's result with all task sets merged, plus `seconds` per set and `sources`.

    report: gets one line for each set that is done, on the first process.
    carry_state: rolling tasks also get `METRIC_state_carried` (`efla_lm.evaluation.whole_documents`).
    Random streams and the model's training mode are restored afterwards.
    """
    merged: dict[str, Any] = {key: {} for key in MERGED}
    merged |= {"seconds": {}, "sources": {}}
    network = model.scorer.model
    was_training = network.training
    network.eval()
    try:
        with _random_streams_kept(), _templates_compiled_once():
            for task_set in task_sets:
                start = time.perf_counter()
                name = ", ".join(task_set.groups or task_set.tasks)
                for task in task_set.tasks.values():
                    task.set_config(key="num_fewshot", value=num_fewshot)
                    task.set_fewshot_seed(seed=seed)
                torch.manual_seed(seed)
                with _quiet_harness(model.scorer.rank == 0), _documents_prepared_once(task_set):
                    found = evaluate(
                        lm=model,
                        task_dict={"tasks": task_set.tasks, "groups": task_set.groups},
                        limit=limit,
                        bootstrap_iters=bootstrap if model.scorer.rank == 0 else 0,
                        log_samples=False,
                    )
                assert found is not None
                if carry_state:
                    for task_name, task in task_set.tasks.items():
                        found["results"][task_name] |= whole_documents.metrics(model, task, limit)
                for key in MERGED:
                    merged[key] |= found.get(key, {})
                merged["sources"] |= task_set.sources
                merged["seconds"][name] = round(time.perf_counter() - start, 3)
                if model.scorer.rank == 0:
                    report(f"{name}: done in {merged['seconds'][name]:.1f} s")
    finally:
        network.train(was_training)
    return merged


def run_any(model: LM, task_sets: list[TaskSet], limit: int | None = None) -> dict[str, Any]:
    """`results` and `seconds` of any lm-eval model on our task sets, zero-shot, without resampled errors."""
    found: dict[str, Any] = {"results": {}, "seconds": {}}
    for task_set in task_sets:
        start = time.perf_counter()
        for task in task_set.tasks.values():
            task.set_config(key="num_fewshot", value=0)
        with _quiet_harness(True):
            result = evaluate(
                lm=model,
                task_dict={"tasks": task_set.tasks, "groups": task_set.groups},
                limit=limit,
                bootstrap_iters=0,
                log_samples=False,
            )
        assert result is not None
        found["results"] |= result["results"]
        found["seconds"][", ".join(task_set.groups or task_set.tasks)] = round(time.perf_counter() - start, 3)
    return found


@contextlib.contextmanager
def _random_streams_kept() -> Iterator[None]:
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)


@contextlib.contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """lm-eval compiles a prompt's template for every document, two thirds of the host's time on the paper's tasks."""
    compile_anew = harness_utils.env.from_string
    harness_utils.env.from_string = functools.lru_cache(maxsize=256)(compile_anew)
    try:
        yield
    finally:
        harness_utils.env.from_string = compile_anew


@contextlib.contextmanager
def _documents_prepared_once(task_set: TaskSet) -> Iterator[None]:
    """lm-eval asks a task for its documents three times or more, and HellaSwag cleans its texts each time."""
    kept = [(task, name) for task in task_set.tasks.values() for name in ("test_docs", "validation_docs")]
    for task, name in kept:
        setattr(task, name, functools.cache(getattr(task, name)))
    try:
        yield
    finally:
        for task, name in kept:
            delattr(task, name)  # uncovers the class's own method


@contextlib.contextmanager
def _quiet_harness(main: bool) -> Iterator[None]:
    """Silence lm-eval's prints, and keep it from forking workers for its resamples in a process that holds a GPU."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with open(os.devnull, "w") as nowhere:
            bars = contextlib.nullcontext() if main and sys.stderr.isatty() else contextlib.redirect_stderr(nowhere)
            with contextlib.redirect_stdout(nowhere), bars:
                yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before
