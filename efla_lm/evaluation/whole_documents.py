"""Perplexity of whole documents, the recurrent state carried from the first token to the last.

The windowed metric of lm-eval and of the paper's table starts every window of a long document from an empty state. Here
the model reads a document in pieces of the training context and carries state and convolution inputs from piece to
piece, which equals one forward pass: every token is predicted from all tokens before it. The results are additional
metrics `METRIC_state_carried`. They may be worse than the windowed ones if training never showed such old states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from efla_lm.errors import UserError
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.scoring import Pair, Scorer, reduce_logits
from efla_lm.models import EflaForCausalLM

SUFFIX = "_state_carried"


def check_recurrent(model: Any) -> None:
    """Raise UserError unless `model` is one of ours with a recurrent state."""
    if not isinstance(model, EflaForCausalLM) or model.config.rule.op is None:
        kind = getattr(model.config, "mixer", model.config.model_type)
        raise UserError(f"carry_state=true: {kind} has no recurrent state that we can carry; leave it out")


def metrics(model: HarnessLM, task: Any, limit: int | None = None) -> dict[str, float]:
    """`METRIC_state_carried,none` over the first `limit` documents of a rolling task; of another task, nothing."""
    if task.OUTPUT_TYPE != "loglikelihood_rolling":
        return {}
    documents = [document for _, document in task.doc_iterator(rank=0, limit=limit, world_size=1)]
    texts = [task.doc_to_target(document) for document in documents]
    totals = score_documents(model.scorer, model.policy.rolling(texts))
    collected: dict[str, list[Any]] = {}
    for document, total in zip(documents, totals):
        for metric, value in task.process_results(document, [total]).items():
            collected.setdefault(metric, []).append(value)
    aggregate = task.aggregation()
    return {f"{metric}{SUFFIX},none": float(aggregate[metric](values)) for metric, values in collected.items()}


def score_documents(scorer: Scorer, pairs: Sequence[Pair]) -> list[float]:
    """Log-likelihood in nats of each continuation given its context, the state carried throughout.

    The scorer's processes share the documents; each returns all values. Raises UserError without a recurrent state.
    """
    check_recurrent(scorer.model)
    batches = list(_batches(scorer, pairs))
    found = [item for batch in batches[scorer.rank :: scorer.world_size] for item in _score(scorer, pairs, batch)]
    totals = dict(item for part in scorer.gather(found) for item in part)
    return [totals[number] for number in range(len(pairs))]


def _batches(scorer: Scorer, pairs: Sequence[Pair]) -> Iterator[list[int]]:
    """Indices of documents per batch, longest first."""
    order = sorted(range(len(pairs)), key=lambda n: (-len(pairs[n][0]) - len(pairs[n][1]), n))
    start = 0
    while start < len(order):
        piece = min(scorer.max_length, sum(map(len, pairs[order[start]])))
        size = scorer.batch_size if isinstance(scorer.batch_size, int) else max(1, scorer.batch_tokens // piece)
        yield order[start : start + size]
        start += size


@torch.no_grad()
def _score(scorer: Scorer, pairs: Sequence[Pair], numbers: list[int]) -> list[tuple[int, float]]:
    streams = [pairs[n][0] + pairs[n][1] for n in numbers]
    first = [len(pairs[n][0]) - 1 for n in numbers]  # position that predicts the first token of the continuation
    totals = [0.0] * len(numbers)
    cache = scorer.model.new_cache()
    rows = len(numbers)
    for begin in range(0, len(streams[0]) - 1, scorer.max_length):
        unfinished = sum(len(stream) - 1 > begin for stream in streams)  # streams are sorted, longest first
        if unfinished < rows:
            cache.batch_select_indices(torch.arange(unfinished))
            rows = unfinished
        ends = [min(len(stream) - 1, begin + scorer.max_length) for stream in streams[:rows]]
        # right padding changes only the state of rows that end here, whose state is not used again: no mask needed
        inputs = torch.zeros(rows, max(ends) - begin, dtype=torch.long)
        places: list[tuple[int, int]] = []
        targets: list[int] = []
        for row, (stream, end) in enumerate(zip(streams, ends)):
            inputs[row, : end - begin] = torch.tensor(stream[begin:end])
            scored = range(max(begin, first[row]), end)
            places.extend((row, position - begin) for position in scored)
            targets.extend(stream[position + 1] for position in scored)
        logits = scorer.model(input_ids=inputs.to(scorer.device), cache=cache, use_cache=True).logits
        if places:
            owners = [row for row, _ in places]
            for row, total, _ in reduce_logits(logits, places, list(range(len(places))), targets, owners):
                totals[row] += total
    return list(zip(numbers, totals))
