"""Sums of gradients in the backward pass: when they start, in what order, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from efla_lm.models import EflaForCausalLM, initialise
from efla_lm.parallel import distributed
from efla_lm.parallel.cuda_graphs import eager_forward_backward, release
from efla_lm.parallel.overlap import GradientSums, sum_in_backward, sums_of
from efla_lm.training.step import train_step
from tests.training.parts import adamw, cut, ragged_batch, tiny_config
from tests.training.test_graphs import StandIn

VALID = torch.tensor(9.0, dtype=torch.float64)


@pytest.fixture
def world() -> Iterator[distributed.World]:
    yield distributed.start("cpu")
    distributed.finish()


def summing(**fields: Any) -> EflaForCausalLM:
    model = EflaForCausalLM(tiny_config(num_hidden_layers=3, **fields))
    initialise(model, 0)
    distributed.hold_whole(model, "bf16")
    sum_in_backward(model, list(model.model.layers))
    return model.train()


def inputs() -> dict[str, Tensor]:
    batch = ragged_batch()
    return {"input_ids": batch.input_ids, "targets": batch.targets}


def recorded(monkeypatch: pytest.MonkeyPatch, model: EflaForCausalLM) -> list[tuple[str, int]]:
    """The parameters whose gradients are summed, in order, each with the number of gradients that are there then."""
    calls: list[tuple[str, int]] = []
    plain = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        calls.extend((name, len(grads)) for name, grad in grads.items() if grad is tensor)
        return plain(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return calls


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_summed_while_the_pass_goes_on(
    world: distributed.World, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gradient once; the last block first, when the other blocks have none yet; the embedding at the end."""
    model = summing(tie_word_embeddings=tied)
    sums, calls, count = sums_of(model), recorded(monkeypatch, model), len(list(model.parameters()))
    assert sums is not None
    sums.active = True
    eager_forward_backward(model, inputs(), VALID, True)
    names = [name for name, _ in calls]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    blocks = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert blocks == sorted(blocks, reverse=True)
    there = dict(calls)
    in_a_block = blocks.count(2)
    assert all(there[name] <= count - 2 * in_a_block - 1 for name in names if ".layers.2." in name)
    assert names[-1] == "model.embeddings.weight" and there[names[-1]] == count


def test_before_the_last_micro_batch_nothing_is_summed(
    world: distributed.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = summing()
    calls = recorded(monkeypatch, model)
    batches = cut(ragged_batch(), 2)
    train_step(model, adamw(model), batches, world, replicas=1, clip_norm=1.0, stop=False)
    assert len(calls) == len(list(model.parameters()))
    calls.clear()
    sums = sums_of(model)
    assert sums is not None
    sums.active = False
    eager_forward_backward(model, inputs(), VALID, True)
    assert calls == []


def test_parameters_without_a_gradient_hold_nobody_up(
    world: distributed.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums behind an incomplete group start at the end, in the same order."""
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    sums, order, plain = GradientSums([[a], [b, c]]), list[Tensor](), dist.all_reduce

    def all_reduce(grad: Tensor) -> None:
        order.append(grad)
        plain(grad)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    for _ in range(2):
        sums.active = True
        (a.sum() + 2 * b.sum()).backward()
        assert order == []
        sums.finish()
        assert [grad is p.grad for grad, p in zip(order, (b, a), strict=True)] == [True, True]
        order.clear()
        a.grad = b.grad = None


def test_graphs_hold_the_sums_of_the_last_micro_batch(
    world: distributed.World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two graphs of a step in two parts; the sums are recorded in the second, and the numbers are the eager ones."""

    def trained(graphs: bool) -> tuple[list[list[float]], Any]:
        model = summing()
        passes, optimizer, results = StandIn(model) if graphs else eager_forward_backward, adamw(model), []
        for number in range(4):
            batches = cut(ragged_batch(seed=number), 4)
            options: Any = {"replicas": 1, "clip_norm": 1.0, "stop": False, "forward_backward": passes}
            results.append(train_step(model, optimizer, batches, world, **options).tolist())
        return results, passes

    expected, _ = trained(graphs=False)
    got, passes = trained(graphs=True)
    assert got == expected
    assert set(passes._replays) == {(True, False), (False, True)}
    release(passes)
    assert not passes._replays
