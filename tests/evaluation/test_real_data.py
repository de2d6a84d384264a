"""The vendored evaluation sets and tokenizer, where EFLA_SHARED_DATA names their folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from efla_lm import EflaConfig
from efla_lm.evaluation.runner import load_tasks
from scripts.eval_compare.run import OFFICIAL_DOCUMENTS
from tests.evaluation.material import PAPER
from tests.evaluation.test_stock_model import assert_same_numbers, ours, stock

SHARED = os.environ.get("EFLA_SHARED_DATA")

pytestmark = pytest.mark.skipif(SHARED is None, reason="EFLA_SHARED_DATA is not set")


@pytest.fixture(scope="module")
def shared() -> Path:
    return Path(SHARED or "")


def test_counts_are_the_official_ones(shared: Path) -> None:
    task_sets, missing = load_tasks(PAPER, AutoTokenizer.from_pretrained(shared / "tokenizer"), shared / "eval")
    assert not missing
    counts = {name: len(task.eval_docs) for found in task_sets for name, task in found.tasks.items()}
    assert counts == OFFICIAL_DOCUMENTS


def test_numbers_equal_the_stock_model(shared: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizer")
    torch.manual_seed(0)
    config = EflaConfig(
        hidden_size=32, num_heads=2, num_hidden_layers=2, intermediate_size=64, max_position_embeddings=256,
        initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "export")
    tokenizer.save_pretrained(tmp_path / "export")
    found = ours(tmp_path / "export", shared / "eval", limit=6)
    others = [name for name in PAPER if name != "wikitext"]
    assert_same_numbers(found, stock(tmp_path / "export", shared / "eval", tmp_path / "cache", others, 6), others)
    # this tokenizer adds BOS by itself, which the stock model doubles in rolling text unless told not to
    plain = stock(tmp_path / "export", shared / "eval", tmp_path / "cache", ["wikitext"], 6, add_bos_token=False)
    assert_same_numbers(found, plain, ["wikitext"])
