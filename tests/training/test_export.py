"""Exports and validation: what other programs load is what was trained."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
from efla_data.loader.token_file import TokenFile
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import scripts.export
from efla_lm.run.checkpoint import load_model_weights
from efla_lm.run.export import load_model
from tests.training.corpus import VOCAB
from tests.training.launch import metrics, run_here


@pytest.mark.parametrize("tied", [False, True])
def test_export_is_the_checkpoint(corpus: Path, tmp_path: Path, tied: bool) -> None:
    settings = ("name=run", "model=gated_efla", "train.steps=3", f"model.tie_word_embeddings={tied}")
    assert run_here(corpus, tmp_path, *settings) == 0
    run = tmp_path / "run"
    assert not list(run.glob("export.*")) and not list(run.glob("*.tmp"))
    loaded = AutoModelForCausalLM.from_pretrained(run / "export")
    assert loaded.dtype == torch.float32
    state = load_model_weights(run / "checkpoints" / "step-3")
    for name, tensor in state.items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embeddings.weight.data_ptr()) == tied
    rebuilt = load_model(run / "checkpoints" / "step-3")
    ids = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, rebuilt(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    assert tokenizer("w3 w7")["input_ids"] == [3, 7]
    assert loaded.config.eos_token_id == tokenizer.eos_token_id == 0
    assert loaded.config.max_position_embeddings == 16


def test_export_does_not_ask_for_the_backend_of_training(corpus: Path, tmp_path: Path) -> None:
    """What a GPU's kernels trained is evaluated on a CPU too."""
    assert run_here(corpus, tmp_path, "name=run", "train.steps=1", "model.backend=reference") == 0
    step = tmp_path / "run" / "checkpoints" / "step-1"
    assert json.loads((step / "config.json").read_text())["backend"] == "reference"
    assert load_model(step).config.backend == "auto"
    assert AutoConfig.from_pretrained(tmp_path / "run" / "export").backend == "auto"


@pytest.mark.parametrize("bos", [False, True])
def test_export_opens_a_text_as_training_did(bos: bool, tmp_path: Path) -> None:
    """With data.bos=true texts open with BOS; else none is named, and EOS stands before a text, in generate too."""
    lines = [json.dumps({"text": f"{'one two three four ' * 9}{n}"}) for n in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    recipe = Recipe([str(tmp_path / "text.jsonl")], vocab_size=300, heldout_fraction=0.2, bos=bos)
    info = prepare(recipe, tmp_path / "tokens", processes=1).tokenizer
    settings = ("name=run", "train.steps=1", f"data.bos={str(bos).lower()}", "schedule.warmup_updates=0")
    assert run_here(tmp_path / "tokens", tmp_path, *settings) == 0
    export = tmp_path / "run" / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    first = TokenFile.open(tmp_path / "tokens").document(0)
    text = tokenizer.decode(first, skip_special_tokens=True)
    assert [*tokenizer(text).input_ids, info.eos_id] == first.tolist()
    assert tokenizer.bos_token_id == (info.bos_id if bos else None)
    assert AutoConfig.from_pretrained(export).bos_token_id == (info.bos_id if bos else info.eos_id)


def test_export_command(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(corpus, tmp_path, "name=run", "train.steps=5", "train.stop_at=2") == 0
    run, out = tmp_path / "run", tmp_path / "out"
    assert not (run / "export").exists()
    for where in (run, run / "checkpoints" / "step-2"):  # the second replaces the first
        assert scripts.export.main.run([f"checkpoint={where}", f"out={out}"]) == 0
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(out))
    assert scripts.export.main.run([f"checkpoint={run}"]) == 0
    assert (run / "export" / "model.safetensors").is_file()
    capsys.readouterr()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").touch()
    assert scripts.export.main.run([f"checkpoint={run}", f"out={precious}"]) == 1
    assert "holds something else" in capsys.readouterr().err
    assert (precious / "thesis.tex").exists()
    assert scripts.export.main.run([f"checkpoint={tmp_path / 'none'}"]) == 1


def test_validation_is_the_exact_mean(corpus: Path, tmp_path: Path) -> None:
    """Against a sum over all held-out targets, window by window; the last window is short."""
    assert run_here(corpus, tmp_path, "name=run", "train.steps=2") == 0
    model = load_model(tmp_path / "run" / "checkpoints" / "step-2")
    tokens = torch.from_numpy(TokenFile.open(corpus, "heldout").tokens.astype("int64"))
    assert (len(tokens) - 1) % 16 != 0
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 16):
            piece = tokens[start : start + 17]
            total += model(input_ids=piece[None, :-1], targets=piece[None, 1:]).loss.item()
    assert metrics(tmp_path, "run", "val_loss") == [pytest.approx(total / (len(tokens) - 1), rel=1e-6)]


def test_validation_of_a_part(corpus: Path, tmp_path: Path) -> None:
    assert run_here(corpus, tmp_path, "name=run", "train.steps=2", "train.validate_batches=1") == 0
    model = load_model(tmp_path / "run" / "checkpoints" / "step-2")
    tokens = torch.from_numpy(TokenFile.open(corpus, "heldout").tokens[:65].astype("int64"))
    with torch.no_grad():
        loss = model(input_ids=tokens[:-1].view(4, 16), targets=tokens[1:].view(4, 16)).loss / 64
    assert metrics(tmp_path, "run", "val_loss") == [pytest.approx(loss.item(), rel=1e-6)]
