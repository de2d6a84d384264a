"""Log-likelihoods equal a hand computation, whatever the batch size, window or number of processes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from efla_lm.errors import UserError
from efla_lm.evaluation.scoring import Pair, Scorer, windows
from tests.evaluation.material import CONTEXT, make_model

VOCAB = 330
KINDS = ("efla", "gated_efla", "mamba2", "attention", "llama")
BATCH_SIZES = (1, 4, "auto")


def by_hand(model: Any, context: list[int], continuation: list[int], max_length: int) -> tuple[float, bool]:
    """One forward pass per token to predict, each with exactly the inputs of its window, in float64."""
    total, greedy = 0.0, True
    stream = context + continuation
    model = model.double()
    for done in range(0, len(continuation), max_length):
        end = len(context) + min(done + max_length, len(continuation))
        begin = max(0, end - 1 - max_length)
        for at in range(len(context) + done, end):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([stream[begin:at]]), use_cache=False).logits[0, -1]
            total += torch.log_softmax(logits, -1)[stream[at]].item()
            greedy &= int(logits.argmax()) == stream[at]
    model.float()
    return total, greedy


def three_documents() -> list[Pair]:
    """A short one, one cut from the left to fit, and one whose continuation alone is longer than the context."""
    rng = random.Random(3)
    return [
        ([rng.randrange(2, VOCAB) for _ in range(context)], [rng.randrange(2, VOCAB) for _ in range(continuation)])
        for context, continuation in ((5, 3), (CONTEXT + 9, 7), (1, 2 * CONTEXT + 11))
    ]


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_a_hand_computation(kind: str, batch_size: int | str) -> None:
    model = make_model(kind)
    pairs = three_documents()
    scores = Scorer(model, CONTEXT, batch_size).score(pairs)
    for pair, (total, greedy) in zip(pairs, scores, strict=True):
        expected, expected_greedy = by_hand(model, *pair, CONTEXT)
        assert total == pytest.approx(expected, rel=1e-5)
        assert greedy == expected_greedy


def test_the_greedy_continuation_is_known_as_such() -> None:
    model = make_model("efla")
    ids = [5, 6, 7]
    for _ in range(4):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    (_, right), (_, wrong) = Scorer(model, CONTEXT).score([(ids[:3], ids[3:]), (ids[:3], [*ids[3:-1], ids[-1] ^ 1])])
    assert right
    assert not wrong


@pytest.mark.parametrize("kind", ["efla", "gated_efla", "mamba2", "attention"])
def test_the_training_loss_of_a_batch_is_the_evaluation_loss_of_its_tokens(kind: str) -> None:
    model = make_model(kind).train()
    tokens = torch.randint(2, VOCAB, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=tokens[:, :-1], targets=tokens[:, 1:]).loss.item()
    scores = Scorer(model.eval(), CONTEXT).score([(row[:1], row[1:]) for row in tokens.tolist()])
    assert -sum(total for total, _ in scores) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9, 16, 17, 40])
def test_windows_are_the_rolling_windows_of_the_harness(length: int) -> None:
    text = list(range(100, 100 + length))
    theirs = [
        ([*context, *text_part[:-1]], text_part)
        for context, text_part in map(make_disjoint_window, get_rolling_token_windows(text, 0, 8, 1))
    ]
    assert list(windows([0], text, 8)) == theirs


@pytest.mark.parametrize("context_length", [1, 3, 8, 20])
@pytest.mark.parametrize("length", [1, 5, 8, 9, 30])
def test_windows_predict_each_token_once_and_never_exceed_the_context(context_length: int, length: int) -> None:
    context, text = list(range(context_length)), list(range(100, 100 + length))
    cut = list(windows(context, text, 8))
    assert [token for _, targets in cut for token in targets] == text
    stream = context + text
    for inputs, targets in cut:
        assert len(inputs) <= 8
        at = stream.index(targets[0])
        assert inputs[-len(targets)] == stream[at - 1], "the last inputs stand just before their targets"
    assert len(cut[-1][0]) == min(8, len(stream) - 1), "the last window is filled up with context"


def test_equal_inputs_run_once_and_rows_come_longest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("efla")
    seen: list[torch.Tensor] = []
    forward = model.forward

    def spy(input_ids: torch.Tensor, use_cache: bool = True, logits_to_keep: int = 0) -> Any:
        seen.append(input_ids)
        return forward(input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep)

    monkeypatch.setattr(model, "forward", spy)
    scorer = Scorer(model, CONTEXT, 2)
    pairs: list[Pair] = [([5, 6], [7]), ([5, 6], [8]), ([5], [6, 9]), ([4, 5, 6, 7], [8]), ([9], [3])]
    scores = scorer.score(pairs)
    assert [tuple(ids.shape) for ids in seen] == [(2, 4), (1, 1)]
    for pair, (total, _) in zip(pairs, scores, strict=True):
        assert total == pytest.approx(by_hand(model, *pair, CONTEXT)[0], rel=1e-5)


def test_auto_batch_survives_one_very_long_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is limited by its tokens, so the long request is alone in its own."""
    monkeypatch.setattr("efla_lm.evaluation.scoring.CPU_BATCH_TOKENS", 256)
    model = make_model("efla")
    rng = random.Random(5)
    pairs: list[Pair] = [([rng.randrange(2, VOCAB) for _ in range(n)], [7, 8]) for n in (3, 900, 5, 8, 13, 21, 4, 6)]
    widths: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda _, __, kw: widths.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    auto = Scorer(model, 1024, "auto").score(pairs)
    assert widths[0] == (1, 901)
    single = Scorer(model, 1024, 1).score(pairs)
    assert [greedy for _, greedy in auto] == [greedy for _, greedy in single]
    assert [total for total, _ in auto] == pytest.approx([total for total, _ in single], rel=1e-5)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory")])
def test_auto_batch_is_halved_until_it_fits(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    model = make_model("efla")
    rng = random.Random(6)
    pairs: list[Pair] = [([rng.randrange(2, VOCAB) for _ in range(9)], [n]) for n in range(2, 9)]
    expected = Scorer(model, CONTEXT, 1).score(pairs)
    forward = Scorer._forward
    sizes: list[int] = []

    def small_memory(self: Scorer, rows: list[Any]) -> Any:
        sizes.append(len(rows))
        if len(rows) > limit:
            raise error
        return forward(self, rows)

    monkeypatch.setattr(Scorer, "_forward", small_memory)
    limit = 2
    found = Scorer(model, CONTEXT, "auto").score(pairs)
    assert sizes[0] == 7
    assert [total for total, _ in found] == pytest.approx([total for total, _ in expected], rel=1e-5)
    with pytest.raises(UserError, match=r"batch_size=5 of 9 tokens exceeds the memory of cpu; use auto"):
        Scorer(model, CONTEXT, 5).score(pairs)
    limit = 0
    with pytest.raises(UserError, match="one row of 9 tokens exceeds the memory"):
        Scorer(model, CONTEXT, "auto").score(pairs)


def test_another_runtime_error_is_not_taken_for_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scorer, rows: list[Any]) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Scorer, "_forward", broken)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        Scorer(make_model("efla"), CONTEXT).score([([5], [6])])


def test_logits_are_reduced_in_fp32_for_a_bf16_model() -> None:
    model = make_model("llama").bfloat16()
    pairs = three_documents()[:2]
    for (context, continuation), (total, _) in zip(pairs, Scorer(model, CONTEXT, 1).score(pairs), strict=True):
        inputs = (context + continuation)[-CONTEXT - 1 :]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([inputs[:-1]])).logits[0, -len(continuation) :].double()
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(continuation)[:, None]).sum().item()
        assert total == pytest.approx(expected, rel=1e-5)


def test_impossible_requests_are_refused_and_an_empty_continuation_is_certain() -> None:
    scorer = Scorer(make_model("efla"), CONTEXT)
    assert scorer.score([([5], [])]) == [(0.0, True)]
    assert scorer.score([]) == []
    with pytest.raises(UserError, match="id 330, but the model has a vocabulary of 330"):
        scorer.score([([5], [330])])
    with pytest.raises(UserError, match="batch_size=0"):
        Scorer(make_model("efla"), CONTEXT, 0)
    with pytest.raises(UserError, match="batch_size=many"):
        Scorer(make_model("efla"), CONTEXT, "many")
