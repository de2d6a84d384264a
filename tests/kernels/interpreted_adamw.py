"""The optimiser's kernel in Triton's interpreter; run by test_adamw.py under TRITON_INTERPRET=1."""

from __future__ import annotations

import copy

import pytest
import torch
from efla_kernels.triton.adamw import adamw
from torch import nn

from efla_lm.training import distributed, optim
from tests.kernels.adamw_cases import check
from tests.training import parts

OTHERS = [torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 3).t(), torch.zeros(3, device="meta")]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.999)])
def test_updates_against_float64(betas: tuple[float, float], shift: int) -> None:
    check(shift, betas, "cpu")


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_step_is_that_of_torch(max_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates, the second declined; the bias never has a gradient, and the norm alone does not decay."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20))]
    models.append(copy.deepcopy(models[0]))
    for model, backend in zip(models, ("torch", "triton"), strict=True):
        monkeypatch.setattr(optim, "layer_backend", lambda name, x, backend=backend: backend)
        optimizer = parts.adamw(model, lr=0.1, weight_decay=0.5)
        for number in range(3):
            model[0].weight.grad = torch.sin(number + torch.arange(240.0)).view(20, 12)
            model[1].weight.grad, model[1].bias.grad = torch.ones(20) + number, torch.ones(20) - number
            optim.step_unless(optimizer, torch.tensor(number == 1), torch.tensor(2.0, dtype=torch.float64), max_norm)
            assert all(p.grad is None for p in model.parameters())
        assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [2, 0, 2, 2]
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert (ours - theirs).norm() <= 2e-7 * theirs.norm()


def test_parts_of_shared_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's weights, gradients and moments, whose parts on this rank the kernel changes."""
    world = distributed.start("cpu")
    try:
        results = []
        for backend in ("torch", "triton"):
            monkeypatch.setattr(optim, "layer_backend", lambda name, x, backend=backend: backend)
            model = parts.sharded(world, mixer="gated_efla")
            optimizer = parts.adamw(model, lr=0.1)
            for p in model.parameters():
                p.grad = p.detach() * 2 + 1
            optim.step_unless(optimizer, torch.tensor(False), torch.tensor(3.0, dtype=torch.float64), 1.0)
            results.append([distributed.local(p.detach()) for p in model.parameters()])
    finally:
        distributed.finish()
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert (ours - theirs).norm() <= 2e-7 * theirs.norm()


def step(gradients: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    adamw(
        others, gradients, others, others, [torch.zeros(()) for _ in others], lr=1.0, betas=(0.9, 0.95), eps=1e-8,
        weight_decay=0.0, divisor=torch.tensor(1.0), skip=torch.tensor(False),
    )  # fmt: skip


def test_no_tensors() -> None:
    step([], [])


@pytest.mark.parametrize("x", OTHERS)
def test_other_tensors_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="expected contiguous float32 tensors on cpu"):
        step([x], [torch.zeros(x.shape)])
    with pytest.raises(ValueError, match=r"of one shape, got \[\[2\], \[3\], \[2\], \[2\]\]"):
        step([torch.zeros(3)], [torch.zeros(2)])
