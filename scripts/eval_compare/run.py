"""Our evaluation beside lm-eval's stock `hf` model: the same export, tasks and documents, value by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.runner import run_any, run_tasks
from efla_lm.evaluation.scoring import Scorer
from efla_lm.evaluation.tokens import TokenPolicy

# documents of the splits that lm-eval evaluates, as their authors published them
OFFICIAL_DOCUMENTS = {
    "wikitext": 62, "lambada_openai": 5153, "piqa": 1838, "hellaswag": 10042, "winogrande": 1267, "arc_easy": 2376,
    "arc_challenge": 1172, "boolq": 3270, "openbookqa": 500, "sciq": 1000,
}  # fmt: skip
PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
PERPLEXITY_BOUND = 1e-4  # relative; all other metrics count documents and are to be equal


class Recorder:
    """Keeps the log-likelihood of every request that a model answers: {(task, request's texts): nats}."""

    def __init__(self, model: LM) -> None:
        self.scores: dict[tuple[str, tuple[Any, ...]], float] = {}
        for kind in ("loglikelihood", "loglikelihood_rolling"):
            setattr(model, kind, self._listening(getattr(model, kind)))

    def _listening(self, ask: Callable[[list[Instance]], list[Any]]) -> Callable[[list[Instance]], list[Any]]:
        def run(requests: list[Instance]) -> list[Any]:
            answers = ask(requests)
            for request, answer in zip(requests, answers, strict=True):
                total = answer[0] if isinstance(answer, tuple | list) else answer
                self.scores[str(request.task_name), tuple(request.args)] = float(total)
            return answers

        return run


def evaluate_ours(model: Any, tokenizer: Any, context: int, task_sets: Any, limit: int | None) -> tuple[Any, Recorder]:
    """(results, recorded scores) of our evaluation, as `eval.py` makes it."""
    harness = HarnessLM(Scorer(model, context, "auto"), TokenPolicy(tokenizer))
    recorder = Recorder(harness)
    return run_tasks(harness, task_sets, limit=limit, bootstrap=0), recorder


def evaluate_stock(
    location: str, device: Any, task_sets: Any, batch_size: Any, limit: int | None
) -> tuple[Any, Recorder]:
    """(results, recorded scores) of lm-eval's stock model, which loads the export itself, in fp32."""
    harness = HFLM(
        pretrained=location, dtype="float32", device=str(device), batch_size=batch_size, trust_remote_code=False
    )
    recorder = Recorder(harness)
    return run_any(harness, task_sets, limit=limit), recorder


def compare_values(ours: dict[str, Any], stock: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per task and metric of the stock results: both values, their difference, and whether they agree.

    Perplexities agree within `PERPLEXITY_BOUND`, everything else must be equal.
    """
    rows = []
    for task, numbers in stock.items():
        for key, theirs in numbers.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr"):
                continue
            mine = ours[task][key]
            relative = abs(mine - theirs) / abs(theirs) if theirs else abs(mine - theirs)
            agree = relative <= PERPLEXITY_BOUND if metric in PERPLEXITIES else mine == theirs
            rows.append(
                {
                    "task": task,
                    "metric": key,
                    "ours": mine,
                    "stock": theirs,
                    "relative_difference": relative,
                    "agree": agree,
                }
            )
    return rows


def largest_differences(ours: Recorder, stock: Recorder) -> dict[str, dict[str, float | int]]:
    """Per task: requests, and the largest difference in nats between the two log-likelihoods of one request.

    A choice between answers can only differ where their margin is below twice that.

    Raises:
        ValueError: the two were not asked the same.
    """
    if ours.scores.keys() != stock.scores.keys():
        odd = next(iter(ours.scores.keys() ^ stock.scores.keys()))
        raise ValueError(f"expected the same requests to both models, but only one was asked {odd}")
    found: dict[str, dict[str, float | int]] = {}
    for key, theirs in stock.scores.items():
        row = found.setdefault(key[0], {"requests": 0, "largest_difference_nats": 0.0})
        row["requests"] += 1
        row["largest_difference_nats"] = max(row["largest_difference_nats"], abs(ours.scores[key] - theirs))
    return found
