"""CUDA graphs without a GPU: what is recorded is played back by a stand-in, so that memory and bookkeeping are tested.

What activation checkpointing keeps is here too: losses and gradients do not depend on it, the kept tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from efla_lm.errors import UserError
from efla_lm.models import EflaForCausalLM, initialise
from efla_lm.parallel import distributed
from efla_lm.parallel.activation_checkpointing import checkpointed
from efla_lm.parallel.cuda_graphs import GraphedForwardBackward, eager_forward_backward
from efla_lm.settings import TrainSettings, compose
from efla_lm.training.model import plan_execution
from efla_lm.training.optim import set_learning_rate
from efla_lm.training.step import train_step
from tests.training.parts import adamw, cut, ragged_batch, tiny_config


@pytest.fixture
def world() -> Iterator[distributed.World]:
    yield distributed.start("cpu")
    distributed.finish()


def whole(precision: str = "fp32", kind: str = "none", **fields: Any) -> EflaForCausalLM:
    """A tiny model as one process holds it."""
    model = EflaForCausalLM(tiny_config(**fields))
    initialise(model, 0)
    distributed.hold_whole(model, precision)
    for block in model.model.layers:
        block.forward = checkpointed(block.forward, kind)
    return model.train()


class StandIn(GraphedForwardBackward):
    """Recording runs the work for what it allocates and takes back what it computed; a replay computes in place."""

    def __init__(self, model: EflaForCausalLM) -> None:
        super().__init__()
        self.model, self.recorded, self.replayed = model, 0, 0

    def _graph_of(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        before = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        first = all(grad is None for grad in before)
        work()
        for parameter, grad in zip(self.model.parameters(), before, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(torch.zeros_like(parameter.grad) if grad is None else grad)

        def replay() -> None:
            self.replayed += 1
            if first:
                torch._foreach_zero_([p.grad for p in self.model.parameters()])
            work()

        return replay


def trained(world: distributed.World, passes: Callable[[EflaForCausalLM], Any], micro: int, **fields: Any) -> Any:
    """Five steps with another rate each, the third not finite; returns results and weights."""
    model = whole(**fields)
    run, optimizer, results = passes(model), adamw(model), []
    for step in range(5):
        set_learning_rate(optimizer, 1e-2 / (1 + step))
        batches, head = cut(ragged_batch(seed=step), micro), model.lm_head.weight
        kept = head.detach().clone()
        if step == 2:
            head.data[0, 0] = float("nan")
        options: Any = {"replicas": 1, "clip_norm": 0.5, "stop": False, "forward_backward": run}
        results.append(train_step(model, optimizer, batches, world, **options).tolist())
        if step == 2:
            head.data.copy_(kept)
    return results, [p.detach().clone() for p in model.parameters()], run


@pytest.mark.parametrize("micro", [8, 4, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_compute_what_eager_passes_do(world: distributed.World, micro: int, precision: str) -> None:
    """With accumulation, another learning rate each step, clipping, and a step that is not taken: bit for bit."""
    expected, weights, _ = trained(world, lambda model: eager_forward_backward, micro, precision=precision)
    got, ours, run = trained(world, StandIn, micro, precision=precision)
    assert [v[2] for v in got] == [0, 0, 1, 0, 0]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == theirs or (mine[2] == theirs[2] == 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, weights, strict=True))
    steps = 8 // micro
    assert run.recorded == min(steps, 2) and run.replayed == 4 * steps  # the first step is eager


def test_gradients_stay_where_they_were_recorded(world: distributed.World) -> None:
    model = whole()
    run, optimizer, places = StandIn(model), adamw(model), set()
    for step in range(4):
        for micro, batch in enumerate(cut(ragged_batch(seed=step), 4)):
            inputs = {"input_ids": batch.input_ids, "targets": batch.targets}
            run(model, inputs, torch.tensor(9.0, dtype=torch.float64), micro == 0)
        if step:
            places.add(tuple(p.grad.data_ptr() for p in model.parameters()))
        optimizer.zero_grad(set_to_none=True)
    assert len(places) == 1


def test_another_shape_is_refused(world: distributed.World) -> None:
    model = whole()
    run = StandIn(model)
    valid = torch.tensor(9.0, dtype=torch.float64)
    for rows in (8, 8, 4):
        (batch,) = cut(ragged_batch(rows), rows)
        inputs = {"input_ids": batch.input_ids, "targets": batch.targets, "cu_seqlens": None}
        if rows == 4:
            with pytest.raises(ValueError, match=r"input_ids: the graph was recorded for \(8, 24\), got \(4, 24\)"):
                run(model, inputs, valid, True)
        else:
            run(model, inputs, valid, True)
        model.zero_grad(set_to_none=True)


def test_switch_of_graphs(world: distributed.World) -> None:
    def graphs(*overrides: str) -> bool:
        settings = compose("train", list(overrides), TrainSettings)
        return plan_execution(settings.train, settings.parallel, "stream", tiny_config(), world).cuda_graphs

    assert not graphs() and not graphs("train.cuda_graphs=off")
    with pytest.raises(UserError, match=r"train\.cuda_graphs=on needs CUDA devices, and one process or parallel=ddp"):
        graphs("train.cuda_graphs=on")


@pytest.mark.parametrize("mixer", ["efla", "mamba2", "attention"])
@pytest.mark.parametrize("kind", ["selective", "products", "full"])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_changes_memory_only(mixer: str, kind: str, compiled: bool) -> None:
    """Loss and gradients as without; fewer elements kept; one graph for all blocks once compiled."""
    batch = ragged_batch()

    def run(kind: str) -> tuple[Tensor, Tensor, int]:
        model, kept = whole("bf16", kind, mixer=mixer, num_hidden_layers=3), 0
        if compiled:
            torch._dynamo.reset()
            for block in model.model.layers:
                block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager_decomp_partition")

        def count(tensor: Tensor) -> Tensor:
            nonlocal kept
            held = tensor.untyped_storage().nbytes() // tensor.element_size()  # one number may stand for many
            kept += min(tensor.numel(), held) * (not isinstance(tensor, torch.nn.Parameter))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(input_ids=batch.input_ids, targets=batch.targets).loss
        loss.backward()
        return loss, torch.cat([p.grad.flatten() for p in model.parameters()]), kept

    loss, gradient, kept = run("none")
    again, same, fewer = run(kind)
    assert torch.equal(loss, again)
    assert (gradient - same).norm() <= 1e-6 * gradient.norm()
    if compiled:  # what eager checkpointing keeps does not pass these hooks
        assert fewer < 0.8 * kept
