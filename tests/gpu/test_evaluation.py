"""Evaluation on a GPU: batches of any size, fla's own models, and tasks in the middle of compiled bf16 training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from efla_lm.evaluation import checkpoints
from efla_lm.evaluation.scoring import Pair, Scorer
from efla_lm.evaluation.whole_documents import score_documents
from tests.evaluation.material import CONTEXT, make_model, make_tokenizer, write_task_files
from tests.training.corpus import write_corpus
from tests.training.launch import assert_same_weights, metrics, run_here, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB = 330


def pairs(longest: int) -> list[Pair]:
    generator = torch.Generator().manual_seed(0)
    lengths = [(1, longest), (longest // 2, 3), (5, longest // 3), (7, 1), (longest + 9, 4)]
    return [
        tuple(torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in pair)  # type: ignore[misc]
        for pair in lengths
    ]


def totals(scorer: Scorer, given: list[Pair]) -> torch.Tensor:
    return torch.tensor([total for total, _ in scorer.score(given)], dtype=torch.float64)


@pytest.mark.parametrize("kind", ["efla", "gated_efla", "deltanet", "gated_deltanet", "mamba2", "attention", "llama"])
def test_scores_are_those_of_the_cpu_for_any_batch(kind: str) -> None:
    given = pairs(3 * CONTEXT)
    expected = totals(Scorer(make_model(kind), CONTEXT), given)
    model = make_model(kind).cuda()
    for batch_size in (1, 4, "auto"):
        torch.testing.assert_close(totals(Scorer(model, CONTEXT, batch_size), given), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["efla", "gated_efla", "mamba2"])
def test_the_carried_state_is_that_of_the_cpu(kind: str) -> None:
    given = pairs(3 * CONTEXT)
    expected = score_documents(Scorer(make_model(kind), CONTEXT), given)
    found = score_documents(Scorer(make_model(kind).cuda(), CONTEXT), given)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("family", ["deltanet", "gated_deltanet", "mamba2"])
def test_models_of_fla_are_loaded_and_scored(family: str, tmp_path: Path) -> None:
    """Saved as their users publish them; scores equal one forward pass per row, in bf16 as fla's kernels want it."""
    models = pytest.importorskip("fla.models")
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": 2, "initializer_range": 0.15}
    if family == "deltanet":
        theirs: Any = models.DeltaNetForCausalLM(models.DeltaNetConfig(**shape, num_heads=2))
    elif family == "gated_deltanet":
        config = models.GatedDeltaNetConfig(**shape, num_heads=2, head_dim=64, expand_v=1.0)
        theirs = models.GatedDeltaNetForCausalLM(config)
    else:
        theirs = models.Mamba2ForCausalLM(models.Mamba2Config(**shape, head_dim=64, state_size=32))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    make_tokenizer(False).save_pretrained(tmp_path)

    model, _ = checkpoints.load(checkpoints.find(str(tmp_path)))
    checkpoints.place(model, "bf16", torch.device("cuda"))
    given = pairs(300)
    found = totals(Scorer(model, 512, "auto"), given)
    expected = []
    for context, continuation in given:
        ids = torch.tensor([context + continuation], device="cuda")[:, -513:]
        with torch.no_grad():
            log_p = model(input_ids=ids[:, :-1], use_cache=False).logits.float().log_softmax(-1)
        scored = log_p[0].gather(-1, ids[0, 1:, None])[-len(continuation) :]
        expected.append(scored.double().sum().item())
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=2e-2, atol=0.3)


def test_evaluation_leaves_compiled_bf16_training_bit_for_bit_as_it_is(tmp_path: Path) -> None:
    corpus, tasks = write_corpus(tmp_path / "tokens"), write_task_files(tmp_path / "tasks", documents=3)
    common = ["train.device=cuda", "train.precision=bf16", "train.steps=6", "train.compile=true"]
    live = ["eval.every=2", "eval.tasks=[sciq,heldout]", f"eval.local_dir={tasks}", "eval.limit=3"]
    assert run_here(corpus, tmp_path, *common, "name=plain") == 0
    assert run_here(corpus, tmp_path, *common, "name=watched", *live) == 0
    assert len(metrics(tmp_path, "watched", "eval/sciq/acc")) == 3
    assert metrics(tmp_path, "plain") == metrics(tmp_path, "watched")
    assert_same_weights(weights(tmp_path, "plain", 6), weights(tmp_path, "watched", 6))
