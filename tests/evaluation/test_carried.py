"""Perplexity with the state carried over whole documents: equal to one forward pass over each of them."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch

import eval as command
from efla_lm.errors import UserError
from efla_lm.evaluation import checkpoints
from efla_lm.evaluation.scoring import Pair, Scorer
from efla_lm.evaluation.whole_documents import score_documents
from tests.evaluation.material import CONTEXT, make_model, save_export, write_run, write_task_files

VOCAB = 330


def documents() -> list[Pair]:
    """Shorter than the context, one token longer, several times as long, exactly two contexts, and a single token."""
    rng = random.Random(7)
    lengths = (5, CONTEXT + 1, 3 * CONTEXT + 7, 2 * CONTEXT, 1)
    return [([1], [rng.randrange(2, VOCAB) for _ in range(length)]) for length in lengths]


@pytest.mark.parametrize("batch_size", [1, 2, "auto"])
@pytest.mark.parametrize("kind", ["efla", "gated_efla", "deltanet", "gated_deltanet", "mamba2"])
def test_carried_scores_equal_one_pass_over_the_document(kind: str, batch_size: int | str) -> None:
    model = make_model(kind)
    pairs = documents()
    found = score_documents(Scorer(model, CONTEXT, batch_size), pairs)
    for (context, text), total in zip(pairs, found, strict=True):
        ids = torch.tensor([context + text])
        with torch.no_grad():
            log_p = model(input_ids=ids[:, :-1], use_cache=False).logits.double().log_softmax(-1)
        expected = log_p[0].gather(-1, ids[0, 1:, None]).sum().item()
        assert total == pytest.approx(expected, rel=1e-5)


def test_only_what_lies_beyond_the_first_window_differs_from_the_windowed_score() -> None:
    model, pairs = make_model("efla"), documents()
    scorer = Scorer(model, CONTEXT)
    windowed = [total for total, _ in scorer.score(pairs)]
    same = [a == pytest.approx(b, rel=1e-5) for a, b in zip(score_documents(scorer, pairs), windowed, strict=True)]
    assert same == [True, False, False, False, True]


@pytest.mark.parametrize("kind", ["attention", "llama"])
def test_a_model_without_a_recurrent_state_is_refused(kind: str) -> None:
    with pytest.raises(UserError, match="no recurrent state"):
        score_documents(Scorer(make_model(kind), CONTEXT), documents())


def test_the_metric_stands_beside_the_windowed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", texts=["the river is under the winter light . " * 9, "a quiet letter"])
    data = write_task_files(tmp_path / "data")
    arguments = [
        f"checkpoint={run}", "tasks=custom", "tasks.names=[wikitext,heldout,sciq]", f"tasks.local_dir={data}",
        "carry_state=true", "limit=3", "device=cpu",
    ]  # fmt: skip
    assert command.main.run(arguments) == 0
    (path,) = (run / "results").glob("*.json")
    results = json.loads(path.read_text())["results"]
    for task in ("wikitext", "heldout"):
        numbers = results[task]
        assert numbers["word_perplexity_state_carried,none"] != numbers["word_perplexity,none"]
        bits = numbers["bits_per_byte_state_carried,none"]
        assert numbers["byte_perplexity_state_carried,none"] == pytest.approx(2**bits, rel=1e-6)
    assert not any("carried" in key for key in results["sciq"])

    # by hand, for the task of whole texts: word perplexity = exp(-sum of log p / number of words)
    model, tokenizer = checkpoints.load(checkpoints.find(str(run)))
    total = 0.0
    words = 0
    for text in ["the river is under the winter light . " * 9, "a quiet letter"]:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            log_p = model(input_ids=ids[:, :-1], use_cache=False).logits.double().log_softmax(-1)
        total += log_p[0].gather(-1, ids[0, 1:, None]).sum().item()
        words += len(re.split(r"\s+", text))
    assert results["heldout"]["word_perplexity_state_carried,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)


def test_the_command_refuses_it_for_a_transformer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    export, data = save_export(tmp_path / "export", "llama"), write_task_files(tmp_path / "data")
    assert command.main.run([f"checkpoint={export}", f"tasks.local_dir={data}", "carry_state=true"]) == 1
    assert "carry_state=true: llama has no recurrent state" in capsys.readouterr().err
