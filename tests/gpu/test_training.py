"""Training on a GPU: the same loop, without waiting for the device between updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from efla_lm.training import distributed
from efla_lm.training.checkpoint import read_tensors
from efla_lm.training.step import Verdicts, update
from tests.training.corpus import write_corpus
from tests.training.launch import MODELS, assert_same_weights, metrics, run_here
from tests.training.parts import adamw, cut, not_finite_at, ragged_batch, sharded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


@pytest.fixture
def world() -> Iterator[distributed.World]:
    yield distributed.start("cuda")
    torch.cuda.set_sync_debug_mode("default")
    distributed.finish()


@pytest.mark.parametrize("mixer", ["efla", "gated_efla", "mamba2", "attention"])
def test_no_wait_between_updates(world: distributed.World, mixer: str) -> None:
    """An update and the handling of its verdict make no call that waits for the device."""
    model = sharded(world, "bf16", mixer=mixer)
    optimizer, verdicts = adamw(model), Verdicts(max_skipped=3)
    batches = cut(ragged_batch(), 4)

    def step(number: int) -> None:
        verdict = update(model, optimizer, batches, world, replicas=1, clip_norm=1.0, stop=False)
        verdicts.add(number, verdict)

    for number in range(3):  # allocations, kernel choices and FSDP's lazy start may wait
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step(3)
    torch.cuda.set_sync_debug_mode("default")
    assert verdicts.last is not None and verdicts.last.step == 2  # the newest is still in flight
    assert verdicts.settle().step == 3
    assert verdicts.last.loss < 4.2 and verdicts.skipped == 0


def test_non_finite_step_on_the_device(world: distributed.World) -> None:
    model = sharded(world, "bf16")
    optimizer, verdicts = adamw(model), Verdicts(max_skipped=3)
    poisoned = not_finite_at(1)
    for number in range(3):
        before = [distributed.local(p.detach()).clone() for p in model.parameters()]
        verdict = poisoned(model, optimizer, [ragged_batch()], world, replicas=1, clip_norm=1.0, stop=False)
        verdicts.add(number, verdict)
        after = [distributed.local(p.detach()) for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (number == 1)
    verdicts.settle()
    assert verdicts.skipped == 1
    assert all(state["step"].item() == 2 for state in optimizer.state.values())


@pytest.mark.parametrize("model", MODELS)
def test_trains_and_resumes(corpus: Path, tmp_path: Path, model: str) -> None:
    settings = ("train.device=cuda", f"model={model}", "train.precision=bf16", "train.steps=12")
    assert run_here(corpus, tmp_path, "name=straight", *settings) == 0
    assert run_here(corpus, tmp_path, "name=parts", *settings, "train.stop_at=5") == 0
    assert run_here(corpus, tmp_path, "name=parts", *settings) == 0
    losses = metrics(tmp_path, "straight")
    assert losses[-1] < losses[0] - 0.1
    assert metrics(tmp_path, "parts") == pytest.approx(losses, rel=1e-3)  # atomic additions are not in a fixed order
    assert metrics(tmp_path, "straight", "peak_memory_gib")[-1] > 0
    if any(part in torch.cuda.get_device_name() for part in ("H100", "H200", "A100")):
        assert 0 < metrics(tmp_path, "straight", "mfu")[-1] < 1
    on_cpu = read_tensors(tmp_path / "straight" / "checkpoints" / "step-12")
    assert_same_weights(on_cpu, read_tensors(tmp_path / "parts" / "checkpoints" / "step-12"), 2e-2)
