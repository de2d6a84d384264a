"""Packed documents and mixtures through the whole of training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from efla_data.corpus.writer import write_token_files
from efla_data.loader.mixture import MixedSequences
from efla_data.loader.packed import PackedSequences
from efla_data.loader.sequences import StreamSequences
from efla_data.loader.token_file import TokenFile

from efla_lm.models import EflaForCausalLM, initialise
from efla_lm.training.data import describe_packing
from tests.training.corpus import EOS, VOCAB, write_corpus
from tests.training.launch import (
    MODELS,
    assert_same_weights,
    consumed,
    metrics,
    run_here,
    steady_rows,
    weights,
)
from tests.training.parts import tiny_config

PACKED = ("data.packing=documents", "data.max_documents=3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three corpora of one tokenizer: 63, 25 and 4 windows of 16."""
    folder = tmp_path_factory.mktemp("mixture")
    return [write_corpus(folder / str(n), tokens, seed=n) for n, tokens in enumerate((1024, 410, 70))]


def mixture(folders: list[Path], *weights: float) -> tuple[str, ...]:
    names = ",".join(str(folder) for folder in folders)
    return (f"data.mixture=[{names}]", f"data.weights=[{','.join(map(str, weights))}]")


def document_losses(model: EflaForCausalLM, file: TokenFile, context: int) -> tuple[float, int]:
    """(sum, targets) of all documents, each alone: EOS in front, pieces of `context` positions."""
    total, count = 0.0, 0
    for index in range(file.num_documents):
        ids = torch.tensor([EOS, *file.document(index).tolist()])
        for start in range(0, len(ids) - 1, context):
            piece = ids[start : start + context + 1]
            with torch.no_grad():
                total += model(input_ids=piece[None, :-1], targets=piece[None, 1:]).loss.item()
            count += len(piece) - 1
    return total, count


@pytest.mark.parametrize("mixer", MODELS)
def test_packed_loss_is_that_of_each_document_alone(tmp_path: Path, mixer: str) -> None:
    """One update that is one epoch: its loss, and that of validation, against every document by itself."""
    corpus = write_corpus(tmp_path / "tokens", tokens=150, heldout=100, seed=3)
    windows = PackedSequences(TokenFile.open(corpus), 16, 3).count
    settings = (f"model={mixer}", "name=run", "train.steps=1", "train.validate_every=1", "schedule.peak=1e-12")
    settings += ("schedule.initial=1e-12", "schedule.final=1e-12", f"train.batch_tokens={16 * windows}", *PACKED)
    assert run_here(corpus, tmp_path / "runs", *settings, "train.micro_tokens=96") == 0
    config = json.loads((tmp_path / "runs" / "run" / "export" / "config.json").read_text())
    names = ("mixer", "mlp", "output_gate", "intermediate_size", "head_dim")
    model = EflaForCausalLM(tiny_config(**{name: config[name] for name in names}))
    initialise(model, 42)
    model.eval()
    train, count = document_losses(model, TokenFile.open(corpus), 16)
    assert metrics(tmp_path / "runs", "run")[0] == pytest.approx(train / count, rel=1e-5)
    heldout, count = document_losses(model, TokenFile.open(corpus, "heldout"), 16)
    assert metrics(tmp_path / "runs", "run", "val_loss")[0] == pytest.approx(heldout / count, rel=1e-5)


@pytest.mark.parametrize("kind", ["packed", "mixed", "packed and mixed"])
def test_stopped_and_continued_is_bit_equal(folders: list[Path], tmp_path: Path, kind: str) -> None:
    settings: tuple[str, ...] = ("name=run", "train.steps=30", "train.validate_every=15")
    if "packed" in kind:
        settings += PACKED
    if "mixed" in kind:
        settings += mixture(folders, 0.5, 0.3, 0.2)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert run_here(folders[0], straight, *settings) == 0
    for stop in (7, 18):
        assert run_here(folders[0], stopped, *settings, f"train.stop_at={stop}") == 0
    assert run_here(folders[0], stopped, *settings, "train.micro_tokens=16") == 0  # another cut, the same windows
    assert consumed(stopped, "run") == consumed(straight, "run")
    assert steady_rows(stopped, "run")[:18] == steady_rows(straight, "run")[:18]
    assert metrics(stopped, "run") == pytest.approx(metrics(straight, "run"), rel=1e-4)
    assert_same_weights(weights(stopped, "run", 30), weights(straight, "run", 30), tolerance=1e-4)
    if kind == "mixed":
        ids = [window for step in consumed(straight, "run") for window in step]
        owners = [sum(window >= bound for bound in (63, 63 + 25)) for window in ids]
        assert [owners.count(index) for index in range(3)] == [60, 36, 24]
        small = [window for window in ids if window >= 88]
        assert sorted(small[:4]) == sorted(small[4:8]) == [88, 89, 90, 91]  # epochs of its own


def test_another_mixture_or_packing_is_refused(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ("name=run", "train.steps=4", "train.stop_at=2", *mixture(folders[:2], 2, 1))
    assert run_here(folders[0], tmp_path, *first, *PACKED) == 0
    for change, key in (
        (mixture(folders[:2], 1, 2) + PACKED, "data.fingerprint"),
        (mixture([folders[0], folders[2]], 2, 1) + PACKED, "data.fingerprint"),
        ((*mixture(folders[:2], 2, 1), "data.packing=documents", "data.max_documents=4"), "data.max_documents"),
        (mixture(folders[:2], 2, 1), "data.packing"),
    ):
        assert run_here(folders[0], tmp_path, "name=run", "train.steps=4", *change) == 1
        assert f"saved with {key}=" in capsys.readouterr().err
    assert run_here(folders[0], tmp_path, "name=run", "train.steps=4", *mixture(folders[:2], 20, 10), *PACKED) == 0


def test_one_tokenizer_for_all(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_token_files(tmp_path / "other", {"train": [[1, 2, EOS]] * 30}, VOCAB + 1, EOS)
    settings = mixture([folders[0], tmp_path / "other"], 1, 1)
    assert run_here(folders[0], tmp_path / "runs", *settings) == 1
    line = capsys.readouterr().err
    assert f"tokenizer vocab_size={VOCAB}" in line and f"{tmp_path / 'other'} {VOCAB + 1}" in line


def test_a_bos_that_is_in_no_text_does_not_part_tokenizers(tmp_path: Path) -> None:
    """A tokenizer that names a BOS, and its copy beside token files, which does not, may be mixed."""
    corpora = [write_corpus(tmp_path / name) for name in ("named", "copy")]
    manifest = corpora[0] / "manifest.json"
    content = json.loads(manifest.read_text())
    content["tokenizer"]["bos_id"] = 1
    manifest.write_text(json.dumps(content))
    assert run_here(corpora[0], tmp_path / "runs", "train.steps=1", *mixture(corpora, 1, 1)) == 0


def test_settings_that_contradict_each_other(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, words in (
        (("data.packing=documents", "data.mask_boundaries=true"), "belongs to data.packing=stream"),
        (("data.packing=documents", "train.compile=true", "train.steps=1"), "set train.compile=false"),
        (("data.max_documents=4",), "belongs to data.packing=documents"),
        (("data.packing=documents", "data.max_documents=0"), "data.max_documents: got 0"),
        ((f"data.mixture=[{folders[0]}]",), "data.weights: got [], expected 1"),
        (("data.weights=[1]",), "data.weights: got [1.0], expected 0"),
    ):
        assert run_here(folders[0], folders[0] / "runs", *overrides) != 0
        assert words in capsys.readouterr().err


def test_banner_tells_how_full_the_windows_are(folders: list[Path]) -> None:
    files = [TokenFile.open(folder) for folder in folders[:2]]
    assert describe_packing(StreamSequences(files[0], 16)) == ""
    text = describe_packing(MixedSequences([PackedSequences(file, 16, 2) for file in files], [1, 1]))
    assert "whole documents" in text and "% of positions filled, at most 2 per sequence" in text
