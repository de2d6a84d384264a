"""Held-out text: decoded as it was, and its perplexity as computed by hand across windows."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path

import pytest
import torch
from efla_data.corpus.writer import write_token_files

from efla_lm.errors import UserError
from efla_lm.evaluation import checkpoints
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.heldout import documents
from efla_lm.evaluation.runner import load_tasks, run_tasks
from efla_lm.evaluation.scoring import Scorer
from efla_lm.evaluation.tokens import TokenPolicy
from tests.evaluation.material import CONTEXT, make_model, make_tokenizer, some_words, write_run, write_tokens

TEXTS = [
    some_words(random.Random(1), 120),  # several windows
    "A line.\n\n  Indented, with\ttabs and spaces at the end  ",
    "\u00fcn\u00efcode \u2014 \u65e5\u672c\u8a9e \U0001f600",
    "x",
]


def test_text_is_decoded_as_it_was(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "tokens", TEXTS)
    rows, description = documents(folder, make_tokenizer(True))
    assert [row["text"] for row in rows] == TEXTS
    assert description["documents"] == 4
    assert description["decoded_bytes"] == sum(len(text.encode()) for text in TEXTS)


def test_an_empty_document_is_left_out_and_no_text_at_all_is_missing(tmp_path: Path) -> None:
    rows, _ = documents(write_tokens(tmp_path / "some", ["", "x", " \n"]), make_tokenizer(False))
    assert rows == [{"text": "x"}]
    write_tokens(tmp_path / "none", [""])
    _, missing = load_tasks(["heldout"], make_tokenizer(False), token_dir=tmp_path / "none")
    assert "holds no text" in missing["heldout"]
    _, missing = load_tasks(["heldout"], make_tokenizer(False), token_dir=tmp_path / "nowhere")
    assert "manifest.json" in missing["heldout"]


def test_a_split_that_was_never_made_is_missing(tmp_path: Path) -> None:
    write_token_files(tmp_path / "tokens", {"train": [[5, 1]]}, 330, 1)
    _, missing = load_tasks(["heldout"], make_tokenizer(False), token_dir=tmp_path / "tokens")
    assert "no split 'heldout'" in missing["heldout"]


@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
@pytest.mark.parametrize("kind", ["efla", "llama"])
def test_word_perplexity_equals_an_own_computation_across_windows(
    kind: str, batch_size: int | str, tmp_path: Path
) -> None:
    """exp(-sum log p / words): windows of at most CONTEXT inputs, the first opened by the start token, the last one
    filled up with context from the left."""
    model, tokenizer = make_model(kind), make_tokenizer(False)
    folder = write_tokens(tmp_path / "tokens", TEXTS)
    total, words, size, scored = 0.0, 0, 0, 0
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        stream = [tokenizer.bos_token_id, *ids]
        for begin in range(0, len(ids), CONTEXT):
            end = min(begin + CONTEXT, len(ids))
            inputs = stream[max(0, end - CONTEXT) : end]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([inputs])).logits[0].double()
            log_p = torch.log_softmax(logits, -1)[-(end - begin) :]
            total += log_p.gather(1, torch.tensor(stream[begin + 1 : end + 1])[:, None]).sum().item()
            scored += end - begin
        words += len(re.split(r"\s+", text))
        size += len(text.encode())
    assert scored == sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS)

    harness = HarnessLM(Scorer(model, CONTEXT, batch_size), TokenPolicy(tokenizer))
    task_sets, missing = load_tasks(["heldout"], tokenizer, token_dir=folder)
    assert not missing
    found = run_tasks(harness, task_sets)["results"]["heldout"]
    assert found["word_perplexity,none"] == pytest.approx(math.exp(-total / words), rel=1e-4)
    assert found["byte_perplexity,none"] == pytest.approx(math.exp(-total / size), rel=1e-5)
    assert found["bits_per_byte,none"] == pytest.approx(-total / size / math.log(2), rel=1e-5)


def test_an_evaluation_leaves_random_streams_and_the_training_mode_as_they_were(tmp_path: Path) -> None:
    model, tokenizer = make_model("efla"), make_tokenizer(False)
    task_sets, _ = load_tasks(["heldout"], tokenizer, token_dir=write_tokens(tmp_path / "tokens", TEXTS))
    model.train()
    torch.manual_seed(7)
    random.seed(7)
    expected = (torch.rand(1).item(), random.random())
    torch.manual_seed(7)
    random.seed(7)
    run_tasks(HarnessLM(Scorer(model, CONTEXT), TokenPolicy(tokenizer)), task_sets)
    assert (torch.rand(1).item(), random.random()) == expected
    assert model.training


def test_the_token_folder_of_a_run_comes_from_its_configuration(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert checkpoints.token_folder(checkpoints.find(str(run))) == tmp_path / "run-tokens"
    assert checkpoints.token_folder(checkpoints.find(str(run / "export"))) == tmp_path / "run-tokens"
    (run / "config.yaml").write_text("model: {}\n")
    with pytest.raises(UserError, match=r"names no data\.dir: give tasks\.data_dir"):
        checkpoints.token_folder(checkpoints.find(str(run)))
