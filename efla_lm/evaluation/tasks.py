"""Tasks for lm-eval, read from the hub or from a folder of local copies.

A local copy is one file per task, `TASK*_SPLIT.jsonl` or `.jsonl.gz`, with one JSON object per line and the field names
of the hub data set. SPLIT is the split that the task evaluates (`test`, else `validation`): `piqa_validation.jsonl`,
`wikitext2_raw_test.jsonl.gz`, `winogrande_xl_validation.jsonl`. Prompts, targets and metrics come from the installed
lm-eval, only the documents from the file. Nothing is written to a cache.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import lm_eval.tasks
import pyarrow
from lm_eval.tasks import TaskManager

from efla_lm.errors import UserError

STOCK = Path(lm_eval.tasks.__file__).parent
# Reading the index of all stock tasks takes about ten seconds; these folders hold the paper's ten.
COMMON_FOLDERS = (
    "wikitext", "lambada", "piqa", "hellaswag", "winogrande", "arc", "super_glue/boolq", "openbookqa", "sciq",
)  # fmt: skip


@dataclass
class TaskSet:
    """What one name stands for: leaf tasks, the groups above them, and the files of local documents."""

    tasks: dict[str, Any]
    groups: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, dict[str, Any]] = field(default_factory=dict)


class MissingTask(UserError):
    """A task whose documents cannot be loaded; the other tasks may still be evaluated."""


def describe_missing(missing: Mapping[str, str]) -> list[str]:
    """The reasons of `load_tasks`, one line each; tasks that are missing for the same reason share a line."""
    names: dict[str, list[str]] = {}
    for name, text in missing.items():
        names.setdefault(text.removeprefix(f"task {name}: "), []).append(name)
    return [
        text if text == missing[who[0]] else f"task{'s' * (len(who) > 1)} {', '.join(who)}: {text}"
        for text, who in names.items()
    ]


def manager_for(names: list[str], key: str = "tasks.names") -> TaskManager:
    """The quick index if it has all names (the setting `key`), else the full one.

    Raises:
        UserError: lm-eval knows no such task, group or tag; the nearest name is given.
    """
    folders: list[str | Path] = [STOCK / folder for folder in COMMON_FOLDERS if (STOCK / folder).is_dir()]
    quick = TaskManager(include_path=folders, include_defaults=False)
    if all(name in quick.task_index for name in names):
        return quick
    full = TaskManager()
    for name in names:
        if name not in full.task_index:
            near = get_close_matches(name, full.all_tasks, n=1)
            hint = f"; the nearest name is {near[0]}" if near else ""
            raise UserError(f"{key}: lm-eval {lm_eval.__version__} has no task {name}{hint}")
    return full


def load_from_hub(manager: TaskManager, name: str, key: str = "tasks.local_dir") -> TaskSet:
    """A task, group or tag with its data sets from the hub or its cache. key: the setting for a folder of local copies.

    Raises:
        MissingTask: a data set cannot be read.
    """
    try:
        loaded = manager.load([name])
    except Exception as error:  # the hub's clients raise errors of many unrelated kinds
        hint = f"without a network give a folder of local copies: {key}=FOLDER (conf/tasks/paper.yaml names the files)"
        if huggingface_hub.constants.HF_HUB_OFFLINE and isinstance(error, OSError):
            raise MissingTask(
                f"task {name}: the hub is out of reach and its data are not in the local cache; {hint}"
            ) from error
        path = (manager.task_index[name].cfg or {}).get("dataset_path", "a data set")
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        raise MissingTask(
            f"task {name}: cannot read {path} from the hub ({type(error).__name__}: {first_line}); {hint}"
        ) from error
    return TaskSet(dict(loaded["tasks"]), dict(loaded.get("groups", {})))


def load_local(manager: TaskManager, name: str, folder: Path, key: str = "tasks.local_dir") -> TaskSet:
    """A task, or every leaf task of a group or tag, with documents from files in `folder` (the setting `key`).

    Raises:
        MissingTask: there is no file for the task, or it does not fit.
    """
    found = TaskSet({})
    for leaf in leaf_names(manager, name):
        task, source = _load_local_task(manager, leaf, folder, key)
        found.tasks[leaf] = task
        found.sources[leaf] = source
    return found


def leaf_names(manager: TaskManager, name: str) -> list[str]:
    """The tasks that a task, group or tag stands for, in order, without repeats."""
    entry = manager.task_index[name]
    if entry.tags and (entry.cfg is None):
        members: list[str] = sorted(entry.tags)
    elif isinstance((entry.cfg or {}).get("task"), list):
        members = [m if isinstance(m, str) else m.get("task", m.get("group")) for m in (entry.cfg or {})["task"]]
    else:
        return [name]
    return list(dict.fromkeys(leaf for member in members for leaf in leaf_names(manager, member)))


def _load_local_task(manager: TaskManager, name: str, folder: Path, key: str) -> tuple[Any, dict[str, Any]]:
    config = manager.task_index[name].cfg or {}
    if "class" in config:
        raise MissingTask(f"task {name}: it is a Python class with its own data loading; local copies do not apply")
    split_key = "test_split" if config.get("test_split") else "validation_split"
    split = config.get(split_key)
    if not split:
        raise MissingTask(f"task {name}: its configuration names neither a test nor a validation split")
    path = find_file(folder, name, split, key)
    rows, digest = read_rows(path)
    try:
        documents = datasets.Dataset.from_list(rows)
    except (ValueError, TypeError, OverflowError, pyarrow.ArrowException) as error:
        raise MissingTask(f"task {name}: {path} mixes types in one field ({error})") from error

    def read_local(**metadata: Any) -> dict[str, datasets.Dataset]:  # lm-eval passes the task's metadata
        return {split: documents}

    splits = {"training_split": None, "validation_split": None, "test_split": None, "fewshot_split": None}
    # lm-eval merges overrides with the stock task only inside a group
    override = {"task": name, "custom_dataset": read_local, "dataset_kwargs": None, **splits, split_key: split}
    try:
        task = manager.load([{"group": f"local_{name}", "task": [override]}])["tasks"][name]
    except Exception as error:  # a task's templates and functions raise any error for a missing field
        raise MissingTask(f"task {name}: {path} does not fit the task ({type(error).__name__}: {error})") from error
    return task, {"path": str(path), "sha256": digest, "documents": len(rows)}


def find_file(folder: Path, task: str, split: str, key: str = "tasks.local_dir") -> Path:
    """The local copy of a task's split: `TASK_SPLIT` if it is there, else the only `TASK*_SPLIT`.

    Raises:
        MissingTask: no such file, or several.
    """
    pattern = f"{task}*_{split}.jsonl[.gz]"
    if not folder.is_dir():
        raise MissingTask(f"task {task}: the folder {folder} does not exist ({key})")
    suffixes = (".jsonl", ".jsonl.gz")
    exact = [folder / f"{task}_{split}{suffix}" for suffix in suffixes]
    candidates = [path for path in exact if path.is_file()] or sorted(
        path for suffix in suffixes for path in folder.glob(f"{task}*_{split}{suffix}") if path.is_file()
    )
    if not candidates:
        raise MissingTask(f"task {task}: no file {folder / pattern}")
    if len(candidates) > 1:
        names = ", ".join(path.name for path in candidates)
        raise MissingTask(f"task {task}: expected one file {folder / pattern}, found {names}")
    return candidates[0]


def read_rows(path: Path) -> tuple[list[dict[str, Any]], str]:
    """(documents, sha256 of the file) of a .jsonl or .jsonl.gz file.

    Raises:
        MissingTask: the file is empty or damaged, or a line is not an object with the fields of the first one.
    """
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise MissingTask(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise MissingTask(f"{path}:{number} is not JSON ({error})") from error
        if not isinstance(row, dict) or (rows and row.keys() != rows[0].keys()):
            expected = f"the fields {', '.join(rows[0])}" if rows else "an object"
            raise MissingTask(f"{path}:{number}: expected {expected}, got {line[:80]}")
        rows.append(row)
    if not rows:
        raise MissingTask(f"{path} holds no documents")
    return rows, hashlib.sha256(raw).hexdigest()
