"""The stacked experiments on a GPU: the Triton op gives the gradients of the chunked form, at these shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from efla_data.mad import BASELINES, generate

from efla_lm.experiments import mad
from efla_lm.experiments.smnist import Classifier
from efla_lm.experiments.stack import initialise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    return float((x - reference).norm() / reference.norm())


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


@pytest.mark.parametrize("mixer", ["efla", "deltanet", "gated_efla", "gated_deltanet"])
def test_classifier_of_784_tokens(mixer: str) -> None:
    pixels = torch.rand(1, 16, 784, generator=torch.Generator().manual_seed(0)).cuda().expand(3, -1, -1)
    target = (torch.arange(48) % 10).cuda()
    found = []
    for backend in ("torch", "triton"):
        model = Classifier(mixer, 3, 784, backend).cuda()
        initialise(model, [0, 1, 2])
        F.cross_entropy(model(pixels).flatten(0, 1), target).backward()
        found.append(gradients(model))
    assert relative(found[1], found[0]) < 1e-3


@pytest.mark.parametrize("task", ["in_context_recall", "selective_copy", "compression"])
@pytest.mark.parametrize("mixer", ["efla", "deltanet"])
def test_mad_model(mixer: str, task: str) -> None:
    setting = BASELINES[task]
    ids, targets = (torch.from_numpy(a).cuda() for a in generate(setting, "train", 16))
    found = {}
    for backend, precision in (("torch", "fp32"), ("triton", "fp32"), ("triton", "bf16")):
        model = mad.MadModel(mixer, 2, setting, backend).cuda()
        initialise(model, [0, 1])
        mad.member_losses(model, ids, targets, precision).sum().backward()
        found[backend, precision] = gradients(model)
    assert relative(found["triton", "fp32"], found["torch", "fp32"]) < 1e-3
    assert relative(found["triton", "bf16"], found["torch", "fp32"]) < 5e-2
