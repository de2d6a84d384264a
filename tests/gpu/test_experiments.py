"""The stacked experiments on a GPU: the Triton ops give the gradients of the PyTorch forms, and graphs the same steps.

Shapes are small: what is compared does not depend on them, and fp32 kernels of the whole op take a minute to compile.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from efla_data.tasks.mad import BASELINES, generate
from efla_data.tasks.smnist import LEVELS, Corruptions, as_pixels, synthetic_digits
from efla_kernels.delta_rule.last_token import RULES

from scripts.mad import training as mad
from scripts.smnist.training import Classifier
from scripts.stacked.modules import initialise
from tests.kernels.last_cases import worst_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float((x - reference).norm() / reference.norm())


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rule", RULES)
def test_last_read_out(rule: str) -> None:
    for tokens in (1, 37, 300):
        assert worst_error(rule, tokens, torch.float32, "triton", "cuda") < 1e-5


@pytest.mark.parametrize("mixer", ["efla", "deltanet", "gated_efla", "gated_deltanet"])
def test_classifier_of_784_tokens(mixer: str) -> None:
    """In fp64 on the CPU, and as it trains."""
    pixels = torch.rand(1, 8, 784, generator=torch.Generator().manual_seed(0)).expand(3, -1, -1)
    target = torch.arange(24) % 10
    found = []
    for device, dtype, backend in (("cpu", torch.float64, "torch"), ("cuda", torch.float32, "auto")):
        model = Classifier(mixer, 3, 784, backend)
        initialise(model, [0, 1, 2])
        model.to(device, dtype)
        F.cross_entropy(model(pixels.to(device, dtype)).flatten(0, 1), target.to(device)).backward()
        found.append(gradients(model).cpu())
    assert relative(found[1], found[0]) < 1e-4


def test_corrupted_images_are_those_of_the_cpu() -> None:
    pixels = as_pixels(synthetic_digits(20, seed=0)[0])
    here, there = Corruptions(pixels, 7), Corruptions(pixels, 7, "cuda")
    for kind, levels in LEVELS.items():
        for level in levels:
            assert torch.equal(here.apply(kind, level), there.apply(kind, level).cpu())


@pytest.mark.parametrize("mixer", ["efla", "deltanet"])
def test_mad_model_in_bf16(mixer: str) -> None:
    setting = BASELINES["in_context_recall"]
    ids, targets = (torch.from_numpy(a).cuda() for a in generate(setting, "train", 16))
    found = []
    for backend, precision in (("torch", "fp32"), ("triton", "bf16")):
        model = mad.MadModel(mixer, 2, setting, backend).cuda()
        initialise(model, [0, 1])
        mad.member_losses(model, ids, targets, precision).sum().backward()
        found.append(gradients(model))
    assert relative(found[1], found[0]) < 5e-2


@pytest.mark.parametrize("mixer", ["efla", "mamba2"])
def test_replayed_steps_are_the_eager_ones(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """18 steps of two sizes of batch: the graph's, and by their side the epoch's last, which is smaller."""
    setting = replace(BASELINES["memorization"], vocab_size=32, length=16, train_examples=40)
    members, budget = [mad.Member(1e-3, 0.1, 0), mad.Member(3e-3, 0.0, 1)], mad.Budget(epochs=6, batch=16)
    found = []
    for eager in (2, 10**9):
        monkeypatch.setattr(mad.GraphedStep, "EAGER", eager)
        results = mad.train_and_score(mixer, setting, members, budget, torch.device("cuda"))
        found.append(torch.tensor([result["train"]["loss"] for result in results]))
    assert found[0].shape == (2, 18) and found[0][0, -1] < found[0][0, 0]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
