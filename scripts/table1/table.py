"""Table 1 from result files: our values beside the paper's.

A model is a pair (size, family). Its runs may differ in their seed: then a cell holds the mean over them, its standard
error is the mean of theirs (the documents are the same, so more seeds do not shrink it) and its spread is the sample
standard deviation over seeds. Accuracies are in percent. An average is the mean of the nine accuracies, of ours and of
the paper's alike; it is missing where one of the nine is. The paper's values are in `docs/paper/table1.json`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from efla_lm.errors import UserError
from efla_lm.evaluation.results import PAPER_COLUMNS

PAPER = Path(__file__).resolve().parents[2] / "docs" / "paper" / "table1.json"
AVERAGE = "avg"
HEADINGS = (*(heading for heading, *_ in PAPER_COLUMNS), AVERAGE)
ACCURACIES = tuple(heading for heading, _, _, is_accuracy in PAPER_COLUMNS if is_accuracy)


@dataclass(frozen=True)
class Value:
    """One number of one evaluation, or of several seeds. Accuracies in percent."""

    value: float
    error: float | None = None  # standard error
    spread: float | None = None  # over seeds
    seeds: int = 1
    limit: int | None = None  # of the first so many documents only


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's table; `average` is computed, `printed_average` is what the paper says."""

    values: dict[str, float]
    average: float
    printed_average: float


@dataclass
class Evaluation:
    """All that the result files of one run say about one state of its weights."""

    name: str
    size: str | None
    family: str
    seed: int | None
    weights: str | None = None
    step: int | None = None
    values: dict[str, Value] = field(default_factory=dict)


@dataclass
class ModelRow:
    """A model of the table."""

    size: str | None
    family: str
    members: list[Evaluation]
    values: dict[str, Value | None]
    paper: PaperRow | None


def read_paper(path: Path = PAPER) -> tuple[str, dict[tuple[str | None, str], PaperRow]]:
    """(source, rows by size and family) of the paper's table."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[tuple[str | None, str], PaperRow] = {}
    for row in content["rows"]:
        values = dict(zip(content["columns"], row["values"], strict=True))
        average = statistics.fmean(values[heading] for heading in ACCURACIES)
        rows[row["size"], row["family"]] = PaperRow(values, average, row["printed_average"])
    return content["source"], rows


def read_run(given: str) -> Evaluation:
    """What is known of a run directory, a folder of result files, or one result file.

    Of several evaluated states of the weights the one that was evaluated last counts; for it, files complete each
    other, a newer one wins, and one of all documents wins over one of the first few.

    Raises:
        UserError: nothing is there, or a file is no result of an evaluation.
    """
    path = Path(given)
    if not path.exists():
        raise UserError(f"runs: {given}: no such run, folder or result file")
    run_dir = path if path.is_dir() else path.parent.parent
    folder = path / "results" if (path / "results").is_dir() else path
    files = [path] if path.is_file() else sorted(folder.glob("*.json"))
    found = sorted((_read_file(file) for file in files), key=lambda result: result["evaluation"]["started"])
    evaluation = _identify(run_dir, path, found[-1] if found else {})
    states = [result["evaluation"].get("weights_sha256") for result in found]
    for result, state in zip(found, states):
        if state != states[-1]:
            continue
        for heading, value in _values(result).items():
            if value.limit is None or heading not in evaluation.values or evaluation.values[heading].limit is not None:
                evaluation.values[heading] = value
    return evaluation


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"runs: {path} is not a result file ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise UserError(f"runs: {path} is not a result file: it has no `results`")
    about = content.setdefault("evaluation", {})
    about.setdefault("started", f"{path.stat().st_mtime:020.3f}")
    return content


def _identify(run_dir: Path, given: Path, result: dict[str, Any]) -> Evaluation:
    """Family, size and seed: from the newest result file, else from the run's configuration."""
    about = result.get("evaluation", {})
    model = about.get("model") or {}
    config: Any = {}
    if (run_dir / "config.yaml").is_file():
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))

    def setting(*names: str) -> Any:
        value = config
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    return Evaluation(
        name=str(given),
        size=first(model.get("size"), setting("size", "name")),
        family=first(model.get("family"), setting("model", "mixer"), given.stem),
        seed=first(model.get("seed"), setting("seed")),
        weights=about.get("weights_sha256"),
        step=about.get("step"),
    )


def _values(result: dict[str, Any]) -> dict[str, Value]:
    limit = result["evaluation"].get("settings", {}).get("limit")
    found: dict[str, Value] = {}
    for heading, task, metric, is_accuracy in PAPER_COLUMNS:
        numbers = result["results"].get(task, {})
        value = numbers.get(metric)
        if not _is_number(value):
            continue
        scale = 100.0 if is_accuracy else 1.0
        name, _, filter_name = metric.partition(",")
        error = numbers.get(f"{name}_stderr,{filter_name}")
        found[heading] = Value(scale * value, scale * error if _is_number(error) else None, limit=limit)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def build(evaluations: Iterable[Evaluation], paper: dict[tuple[str | None, str], PaperRow]) -> list[ModelRow]:
    """Rows of the table: the models of the paper in its order, then the others as they were given.

    Raises:
        UserError: the same weights were given twice, which would count as two seeds.
    """
    groups: dict[tuple[str | None, str], list[Evaluation]] = {}
    seen: dict[str, str] = {}
    for item in evaluations:
        if item.weights is not None and item.weights in seen:
            raise UserError(f"runs: {item.name} and {seen[item.weights]} hold the same weights: leave one of them out")
        if item.weights is not None:
            seen[item.weights] = item.name
        groups.setdefault((item.size, item.family), []).append(item)
    order = list(paper)
    keys = sorted(groups, key=lambda key: order.index(key) if key in paper else len(order))
    return [ModelRow(*key, groups[key], _merge(groups[key]), paper.get(key)) for key in keys]


def _merge(members: Sequence[Evaluation]) -> dict[str, Value | None]:
    per_member = [member.values | {AVERAGE: average} if (average := mean_accuracy(member.values)) else member.values
                  for member in members]  # fmt: skip
    return {heading: _mean([m[heading] for m in per_member if heading in m]) for heading in HEADINGS}


def mean_accuracy(values: dict[str, Value]) -> Value | None:
    """Mean of the nine accuracies, whose errors are independent, or None unless all nine are there."""
    if any(heading not in values for heading in ACCURACIES):
        return None
    nine = [values[heading] for heading in ACCURACIES]
    errors = [value.error for value in nine if value.error is not None]
    error = math.sqrt(math.fsum(e * e for e in errors)) / len(nine) if len(errors) == len(nine) else None
    limits = [value.limit for value in nine if value.limit is not None]
    return Value(statistics.fmean(value.value for value in nine), error, limit=min(limits, default=None))


def _mean(values: Sequence[Value]) -> Value | None:
    if not values:
        return None
    errors = [value.error for value in values if value.error is not None]
    return Value(
        value=statistics.fmean(value.value for value in values),
        error=statistics.fmean(errors) if len(errors) == len(values) else None,
        spread=statistics.stdev(value.value for value in values) if len(values) > 1 else None,
        seeds=len(values),
        limit=min((value.limit for value in values if value.limit is not None), default=None),
    )
