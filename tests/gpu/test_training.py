"""Training on a GPU: the same loop, without waiting for the device between updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from efla_lm.models import EflaForCausalLM, initialise
from efla_lm.parallel import distributed
from efla_lm.parallel.activation_checkpointing import checkpointed
from efla_lm.parallel.cuda_graphs import ForwardBackward, GraphedForwardBackward, eager_forward_backward
from efla_lm.run.checkpoint import read_tensors
from efla_lm.training.optim import set_learning_rate
from efla_lm.training.step import StepResults, train_step
from tests.training.corpus import write_corpus
from tests.training.launch import MODELS, assert_same_weights, metrics, run_here
from tests.training.parts import adamw, cut, not_finite_at, ragged_batch, sharded, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens")


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """torch.compile allows a function few variants in one process; each test brings models of its own."""
    torch._dynamo.reset()


@pytest.fixture
def world() -> Iterator[distributed.World]:
    yield distributed.start("cuda")
    torch.cuda.set_sync_debug_mode("default")
    distributed.finish()


def held_whole(kind: str = "none", **fields: Any) -> EflaForCausalLM:
    """A tiny model as one process holds it on the device, blocks compiled."""
    with torch.device("meta"):
        model = EflaForCausalLM(tiny_config(**fields))
    for block in model.model.layers:
        block.forward = torch.compile(checkpointed(block.forward, kind), fullgraph=True)
    distributed.hold_whole(model, "bf16")
    model.to_empty(device="cuda")
    initialise(model, 0)
    return model.train()


@pytest.mark.parametrize("kind", ["none", "selective", "products", "full"])
@pytest.mark.parametrize("mixer", ["efla", "gated_efla", "mamba2", "attention"])
def test_graphs_compute_what_launches_do(world: distributed.World, mixer: str, kind: str) -> None:
    """Six updates of two micro-batches, another learning rate each, one of them not finite: equal within bf16 noise."""

    def trained(passes: ForwardBackward) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model = held_whole(kind, mixer=mixer)
        optimizer, rows = adamw(model), []
        for number in range(6):
            set_learning_rate(optimizer, 1e-2 / (1 + number))
            head = model.lm_head.weight
            kept = head.detach().clone()
            if number == 3:
                head.data[0, 0] = float("nan")
            batches = cut(ragged_batch(seed=number), 4)
            options: Any = {"replicas": 1, "clip_norm": 0.5, "stop": False, "forward_backward": passes}
            rows.append(train_step(model, optimizer, batches, world, **options))
            if number == 3:
                head.data.copy_(kept)
        return torch.stack(rows), [p.detach() for p in model.parameters()]

    eager, weights = trained(eager_forward_backward)
    graphed, ours = trained(GraphedForwardBackward())
    assert eager[:, 2].tolist() == graphed[:, 2].tolist() == [0, 0, 0, 1, 0, 0]
    finite = eager[:, 2] == 0
    assert torch.allclose(eager[finite], graphed[finite], rtol=5e-3), (eager, graphed)
    for a, b in zip(ours, weights, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()


@pytest.mark.parametrize("how", ["sharded", "whole", "graphs"])
@pytest.mark.parametrize("mixer", ["efla", "gated_efla", "mamba2", "attention"])
def test_no_wait_between_updates(world: distributed.World, mixer: str, how: str) -> None:
    """An update and the handling of its result make no call that waits for the device."""
    model = sharded(world, "bf16", mixer=mixer) if how == "sharded" else held_whole(mixer=mixer)
    optimizer, results = adamw(model), StepResults(max_skipped=3)
    batches, passes = cut(ragged_batch(), 4), GraphedForwardBackward() if how == "graphs" else eager_forward_backward

    def step(number: int) -> None:
        options: Any = {"replicas": 1, "clip_norm": 1.0, "stop": False, "forward_backward": passes}
        result = train_step(model, optimizer, batches, world, **options)
        results.add(number, result)

    for number in range(3):  # allocations, kernel choices, FSDP's lazy start and recording may wait
        step(number)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step(3)
    torch.cuda.set_sync_debug_mode("default")
    assert results.last is not None and results.last.step == 2  # the newest is still in flight
    assert results.settle().step == 3
    assert results.last.loss < 4.2 and results.skipped == 0


def test_non_finite_step_on_the_device(world: distributed.World) -> None:
    model = sharded(world, "bf16")
    optimizer, results = adamw(model), StepResults(max_skipped=3)
    poisoned = not_finite_at(1)
    for number in range(3):
        before = [distributed.local(p.detach()).clone() for p in model.parameters()]
        result = poisoned(model, optimizer, [ragged_batch()], world, replicas=1, clip_norm=1.0, stop=False)
        results.add(number, result)
        after = [distributed.local(p.detach()) for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == (number == 1)
    results.settle()
    assert results.skipped == 1
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
