"""Packed documents on a GPU: the losses of the CPU, and no wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from efla_data.loader.batches import TrainLoader
from efla_data.loader.packed import PackedSequences
from efla_data.loader.token_file import TokenFile

from efla_lm.parallel import distributed
from efla_lm.training.step import StepResults, train_step
from tests.training.corpus import write_corpus
from tests.training.launch import MODELS, metrics, run_here
from tests.training.parts import adamw, sharded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", tokens=4096)


@pytest.fixture(autouse=True)
def no_graph_of_another_model() -> None:
    """All models' blocks are one function to the compiler, which gives up after eight graphs of one function."""
    torch._dynamo.reset()


@pytest.fixture
def world() -> Iterator[distributed.World]:
    yield distributed.start("cuda")
    torch.cuda.set_sync_debug_mode("default")
    distributed.finish()


@pytest.mark.parametrize("model", MODELS)
def test_losses_are_those_of_the_cpu(corpus: Path, tmp_path: Path, model: str) -> None:
    """Documents of 3 to 80 tokens in windows of 128, five updates with validation, compiled and not."""
    settings = (f"model={model}", "data.packing=documents", "data.context=128", "train.batch_tokens=512")
    settings += ("train.micro_tokens=256", "train.steps=5", "train.validate_every=5")
    assert run_here(corpus, tmp_path, "name=cpu", *settings) == 0
    on_gpu = (*settings, "train.device=cuda")
    assert run_here(corpus, tmp_path, "name=gpu", *on_gpu) == 0
    assert run_here(corpus, tmp_path, "name=plain", *on_gpu, "train.compile=false") == 0
    for name in ("gpu", "plain"):
        for key in ("loss", "val_loss", "grad_norm"):
            assert metrics(tmp_path, name, key) == pytest.approx(metrics(tmp_path, "cpu", key), rel=2e-3), (name, key)


@pytest.mark.parametrize("mixer", ["efla", "gated_efla", "deltanet", "mamba2", "attention"])
def test_no_wait_between_updates(corpus: Path, world: distributed.World, mixer: str) -> None:
    """The boundaries of documents are checked and used without the host asking for them."""
    windows = PackedSequences(TokenFile.open(corpus), 128)
    loader, model = TrainLoader(windows, 4, 2, seed=1), sharded(world, "bf16", mixer=mixer)
    optimizer, results = adamw(model), StepResults(max_skipped=3)

    def step(number: int) -> None:
        batches = [loader.batch(number, micro) for micro in range(2)]
        results.add(number, train_step(model, optimizer, batches, world, replicas=1, clip_norm=1.0, stop=False))

    for number in range(3):
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step(3)
    torch.cuda.set_sync_debug_mode("default")
    assert results.settle().step == 3 and results.skipped == 0
