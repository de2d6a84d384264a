"""Sequential MNIST: the paper's one-layer classifier [paper, section 4], M of them trained as one, and their tests.

    x_t = GELU(w p_t + position_t)                       pixel p_t, no bias; position table N(0, 0.02^2)
    q, k, v = W x (Xavier, no bias);  beta = sigmoid(w_b x + b), b = -2 at the start
    S_t by the rule;  o_T = S_T^T q_T;  logits = W_o LayerNorm(o_T) + b_o

One head of 64; q is L2-normalised, k in DeltaNet only; no convolution, no pooling, no scale. The classifier reads the
last token only, so it computes one query, and `efla_kernels.last_weights` gives o_T = W_v sum_t m_t x_t without a state
or a value per token. Beyond the paper, `mixer` may be a gated rule or Mamba-2's core (which goes through its state).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from efla_data.tasks.smnist import DEVIATION, LEVELS, MEAN, Corruptions
from numpy.typing import NDArray
from torch import Tensor

from scripts.stacked.modules import (
    StackedAdamW,
    StackedLinear,
    StackedModule,
    StackedNorm,
    constant,
    initialise,
    normal,
    uniform,
    xavier,
)
from scripts.stacked.rules import RECURRENT_MIXERS, StackedGates, StackedSsd, read_last

WIDTH, CLASSES = 64, 10
EVALUATION_ROWS = {"cpu": 256, "cuda": 4096}  # sequences in flight without gradients: caches, memory (6 GiB)
LOG_POINTS = 60


class Classifier(StackedModule):
    """M classifiers of one mixer over sequences of `tokens` pixels."""

    def __init__(self, mixer: str, models: int, tokens: int, backend: str = "auto") -> None:
        super().__init__()
        if mixer not in RECURRENT_MIXERS:
            raise ValueError(f"mixer: expected one of {', '.join(RECURRENT_MIXERS)}, got {mixer!r}")
        self.mixer, self.backend = mixer, backend
        self.pixel = self.add("pixel", models, (WIDTH,), uniform(1.0))
        self.position = self.add("position", models, (tokens, WIDTH), normal(0.02))
        self.q_proj, self.k_proj, self.v_proj = (
            StackedLinear(models, WIDTH, WIDTH, bias=False, draw=xavier(WIDTH, WIDTH)) for _ in range(3)
        )
        if mixer == "mamba2":
            self.dt = StackedLinear(models, WIDTH, 1, bias=False)
            self.ssd = StackedSsd(models, 1)
        else:
            beta = StackedLinear(models, WIDTH, 1, bias=True, bias_draw=constant(-2.0))
            self.gates = StackedGates(mixer, models, WIDTH, 1, beta)
        self.norm = StackedNorm(models, WIDTH, 1e-5, center=True)
        self.head = StackedLinear(models, WIDTH, CLASSES, bias=True, bias_draw=uniform(WIDTH**-0.5))

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [M or 1, B, T] floats -> logits [M, B, 10]."""
        x = F.gelu(torch.addcmul(self.position[:, None], pixels.unsqueeze(-1), self.pixel[:, None, None]))
        k, q = self.k_proj(x).unsqueeze(-2), self.q_proj(x[:, :, -1]).unsqueeze(-2)
        if self.mixer == "mamba2":
            o = self.ssd.read_last(self.v_proj(x).unsqueeze(-2), self.dt(x), k, q, self.backend)
        else:
            o = self.v_proj(read_last(self.mixer, q, k, x.unsqueeze(-2), self.gates(x), backend=self.backend))
        return self.head(self.norm(o.squeeze(-2)))


@dataclass(frozen=True)
class Member:
    """One model of a stack."""

    seed: int
    rate: float


@dataclass(frozen=True)
class Preparation:
    """Applied to pixels in [0, 1] after corruption and before the model."""

    normalise: bool = False  # subtract MNIST's mean, divide by its deviation
    clip: bool = False  # back into [0, 1] after the corruption

    def __call__(self, pixels: Tensor) -> Tensor:
        pixels = pixels.clamp(0, 1) if self.clip else pixels
        return (pixels - MEAN) / DEVIATION if self.normalise else pixels


@dataclass(frozen=True)
class TrainingPlan:
    """Budget that all members share."""

    batch: int = 128
    epochs: int = 1
    steps: int | None = None  # stop here; None: whole epochs
    clip_norm: float = 1.0
    weight_decay: float = 0.01  # AdamW's default

    def count(self, images: int) -> int:
        whole = self.epochs * math.ceil(images / self.batch)
        return whole if self.steps is None else min(whole, self.steps)


def train(
    model: Classifier,
    members: Sequence[Member],
    pixels: Tensor,
    labels: Tensor,
    plan: TrainingPlan,
    prepare: Preparation,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> list[dict[str, list[float]]]:
    """Train all members, each on its seed's order of the images; pixels [N, T] and labels [N] on the model's device.

    Returns each member's curve: by step, mean loss and accuracy on the training batches since the previous point.
    """
    device = pixels.device
    initialise(model, [member.seed for member in members])
    optimiser = StackedAdamW(
        model, [m.rate for m in members], [plan.weight_decay] * len(members), clip_norm=plan.clip_norm
    )
    orders = {seed: _order(seed, len(pixels), plan.epochs).to(device) for seed in {m.seed for m in members}}
    steps = plan.count(len(pixels))
    per_epoch = math.ceil(len(pixels) / plan.batch)
    every = max(1, steps // LOG_POINTS)
    curves: list[dict[str, list[float]]] = [{"step": [], "loss": [], "accuracy": []} for _ in members]
    sums = torch.zeros(2, len(members), device=device)
    counted = 0
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        rows = slice(place * plan.batch, (place + 1) * plan.batch)
        index = torch.stack([orders[m.seed][epoch, rows] for m in members])
        target = labels[index]
        logits = model(prepare(pixels[index]))
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)
        losses.sum().backward()
        optimiser.step()
        sums += torch.stack([losses.detach(), (logits.argmax(-1) == target).float().mean(1)])
        counted += 1
        if counted == every or step + 1 == steps:
            loss, accuracy = (sums / counted).tolist()
            for curve, one_loss, one_accuracy in zip(curves, loss, accuracy):
                curve["step"].append(step + 1)
                curve["loss"].append(round(one_loss, 6))
                curve["accuracy"].append(round(one_accuracy, 6))
            progress(step + 1, steps, float(np.median(loss)))
            sums.zero_()
            counted = 0
    return curves


def _order(seed: int, images: int, epochs: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(images, generator=generator) for _ in range(epochs)])


@torch.no_grad()
def accuracy(model: Classifier, pixels: Tensor, labels: Tensor, prepare: Preparation) -> list[float]:
    """Accuracy of each member on pixels [N, T]."""
    models = model.position.shape[0]
    rows = max(1, EVALUATION_ROWS.get(pixels.device.type, 256) // models)
    right = torch.zeros(models, device=pixels.device)
    for start in range(0, len(pixels), rows):
        logits = model(prepare(pixels[start : start + rows]).unsqueeze(0))
        right += (logits.argmax(-1) == labels[start : start + rows]).sum(1)
    return [count / len(pixels) for count in right.tolist()]


def under_corruption(
    model: Classifier, images: NDArray[np.float32], labels: Tensor, prepare: Preparation, seed: int
) -> list[dict[str, dict[str, list[float]]]]:
    """Each member's accuracy at every level of every corruption of images [N, T] in [0, 1]."""
    corruptions = Corruptions(images, seed, labels.device)
    models = model.position.shape[0]
    found: list[dict[str, dict[str, list[float]]]] = [{} for _ in range(models)]
    for kind, levels in LEVELS.items():
        table = [accuracy(model, corruptions.apply(kind, level), labels, prepare) for level in levels]
        for member, result in enumerate(found):
            result[kind] = {"level": list(levels), "accuracy": [row[member] for row in table]}
    return found


def chosen(model: Classifier, members: Sequence[int]) -> Classifier:
    """The classifiers `members` of a stack alone, in a new stack."""
    smaller = Classifier(model.mixer, len(members), model.position.shape[1], model.backend).to(model.position.device)
    rows = torch.tensor(list(members), device=model.position.device)
    smaller.load_state_dict({name: value.index_select(0, rows) for name, value in model.state_dict().items()})
    return smaller


def timed(work: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """(result, seconds) of work, including what it left in the queue of the device."""
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
