"""Models and training of the MAD protocol (Poli et al. 2024); a sweep of rates and weight decays trains as one stack.

A model is an embedding, two blocks of RMSNorm - mixer - RMSNorm - SwiGLU of width 128, and a norm and linear head with
bias. The blocks are those of `efla_lm.models` (a test compares them) with short convolutions; a layer holds 4096
numbers of state: 4 heads of 32 x 32, or 256 x 16 in Mamba-2. In the compression task an auto-encoder reads the last
token of the blocks alone: it adds sine positions, and a two-layer GELU MLP predicts each token of the input.

As in the benchmark: AdamW with torch's defaults, no decay on biases and norms, batch 128, a cosine over the epochs down
to 1e-6, no clipping, weights drawn as torch draws them (N(0, 0.02^2) for embeddings and in the auto-encoder).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import efla_kernels
import torch
import torch.nn.functional as F
from efla_data.tasks.mad import IGNORED, TEST_EXAMPLES, Setting, generate
from torch import Tensor, nn

from efla_lm.models.rules import RULES
from scripts.stacked.cuda_graph import GraphedStep
from scripts.stacked.modules import (
    Draw,
    StackedAdamW,
    StackedLinear,
    StackedModule,
    StackedNorm,
    initialise,
    normal,
    uniform,
)
from scripts.stacked.rules import RECURRENT_MIXERS, StackedGates, StackedSsd, run_rule

WIDTH, BLOCKS, MLP = 128, 2, 352  # the benchmark's SwiGLU: 8/3 of the width, rounded up to a multiple of 16
HEADS, HEAD_DIM = 4, 32
MAMBA_INNER, MAMBA_HEADS, MAMBA_STATE = 256, 4, 16
KERNEL_SIZE, EPS = 4, 1e-6
LOWEST_RATE = 1e-6
LOG_POINTS = 40


class StackedConvolution(StackedModule):
    """Causal depthwise convolution and SiLU, per model: as `efla_lm.models.layers.ShortConvolution`."""

    def __init__(self, models: int, widths: tuple[int, ...], bias: bool = False, backend: str = "auto") -> None:
        super().__init__()
        self.widths, self.backend = widths, backend
        self.weight = self.add("weight", models, (sum(widths), KERNEL_SIZE), uniform(KERNEL_SIZE**-0.5))
        self.bias = self.add("bias", models, (sum(widths),), lambda shape, _: torch.zeros(shape)) if bias else None

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [M, B, T, D] -> one [M, B, T, width] for each of `widths`."""
        biases = [None] * len(x) if self.bias is None else self.bias.unbind(0)
        models = [
            efla_kernels.short_convolution(*inputs, widths=self.widths, backend=self.backend)
            for inputs in zip(x.unbind(0), self.weight.unbind(0), biases)
        ]
        return [torch.stack(parts) for parts in zip(*models)]


class DeltaMixer(StackedModule):
    """The delta rules' mixer, as `efla_lm.models.mixers.DeltaMixer`."""

    def __init__(self, mixer: str, models: int, linear: Callable[..., StackedLinear], backend: str) -> None:
        super().__init__()
        self.mixer, self.backend = mixer, backend
        inner = HEADS * HEAD_DIM
        self.qkv_proj = linear(models, WIDTH, 3 * inner, bias=False)
        self.qkv_conv = StackedConvolution(models, (inner,) * 3, backend=backend)
        self.gates = StackedGates(mixer, models, WIDTH, HEADS, linear(models, WIDTH, HEADS, bias=False))
        self.g_proj = linear(models, WIDTH, inner, bias=False) if RULES[mixer].gated else None
        self.o_norm = StackedNorm(models, HEAD_DIM, EPS)
        self.o_proj = linear(models, inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, B, T, WIDTH] -> the same."""
        q, k, v = (part.unflatten(-1, (HEADS, HEAD_DIM)) for part in self.qkv_conv(self.qkv_proj(x)))
        o = self.o_norm(run_rule(self.mixer, q, k, v, self.gates(x), backend=self.backend))
        if self.g_proj is not None:
            o = o * F.silu(self.g_proj(x)).unflatten(-1, (HEADS, HEAD_DIM))
        return self.o_proj(o.flatten(3))


class Mamba2Mixer(StackedModule):
    """Mamba-2's mixer, as `efla_lm.models.mixers.Mamba2Mixer`."""

    def __init__(self, models: int, linear: Callable[..., StackedLinear], backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.in_proj = linear(models, WIDTH, 2 * MAMBA_INNER + 2 * MAMBA_STATE + MAMBA_HEADS, bias=False)
        self.conv = StackedConvolution(models, (MAMBA_INNER, MAMBA_STATE, MAMBA_STATE), bias=True, backend=backend)
        self.ssd = StackedSsd(models, MAMBA_HEADS)
        self.norm = StackedNorm(models, MAMBA_INNER, EPS)
        self.out_proj = linear(models, MAMBA_INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [M, B, T, WIDTH] -> the same."""
        z, xbc, dt = self.in_proj(x).split((MAMBA_INNER, MAMBA_INNER + 2 * MAMBA_STATE, MAMBA_HEADS), -1)
        inner, B, C = self.conv(xbc)
        heads = inner.unflatten(-1, (MAMBA_HEADS, -1))
        y = self.ssd(heads, dt, B.unsqueeze(-2), C.unsqueeze(-2), self.backend)
        return self.out_proj(self.norm(y.flatten(3) * F.silu(z)))


class Block(StackedModule):
    """x + mixer(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, mixer: str, models: int, linear: Callable[..., StackedLinear], backend: str) -> None:
        super().__init__()
        self.mixer_norm = StackedNorm(models, WIDTH, EPS)
        self.mixer = (
            Mamba2Mixer(models, linear, backend) if mixer == "mamba2" else DeltaMixer(mixer, models, linear, backend)
        )
        self.mlp_norm = StackedNorm(models, WIDTH, EPS)
        self.gate_up_proj = linear(models, WIDTH, 2 * MLP, bias=False)
        self.down_proj = linear(models, MLP, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        gate, up = self.gate_up_proj(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)


class MadModel(StackedModule):
    """M models of one mixer for one setting; the auto-encoder where the task is compression."""

    def __init__(self, mixer: str, models: int, setting: Setting, backend: str = "auto") -> None:
        super().__init__()
        if mixer not in RECURRENT_MIXERS:
            raise ValueError(f"mixer: expected one of {', '.join(RECURRENT_MIXERS)}, got {mixer!r}")
        self.auto_encoder = setting.task == "compression"
        draw: Draw | None = normal(0.02) if self.auto_encoder else None  # None: as torch draws linear layers

        def linear(models: int, inputs: int, outputs: int, *, bias: bool) -> StackedLinear:
            return StackedLinear(models, inputs, outputs, bias=bias, draw=draw)

        self.embedding = self.add("embedding", models, (setting.vocab_size, WIDTH), normal(0.02))
        self.blocks = nn.ModuleList(Block(mixer, models, linear, backend) for _ in range(BLOCKS))
        if self.auto_encoder:
            self.positions: Tensor
            self.register_buffer("positions", sine_positions(setting.length), persistent=False)
            self.decoder_norms = nn.ModuleList(StackedNorm(models, WIDTH, EPS) for _ in range(2))
            self.decoder = nn.ModuleList(linear(models, WIDTH, WIDTH, bias=True) for _ in range(2))
        self.norm = StackedNorm(models, WIDTH, EPS)
        self.head = linear(models, WIDTH, setting.vocab_size, bias=True)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T], the same for all models -> logits [M, B, T, vocab]."""
        models, vocab = self.embedding.shape[:2]
        offsets = torch.arange(models, device=ids.device)[:, None, None] * vocab
        x = F.embedding(ids + offsets, self.embedding.flatten(0, 1))
        for block in self.blocks:
            x = block(x)
        if self.auto_encoder:
            x = x[:, :, -1:] + self.positions
            for norm, layer in zip(self.decoder_norms, self.decoder):
                x = F.gelu(layer(norm(x)))
        return self.head(self.norm(x))


def sine_positions(length: int) -> Tensor:
    """[length, WIDTH]: sines, then cosines, of position times frequencies falling from 1 to 1e-4."""
    half = WIDTH // 2
    frequency = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
    angle = torch.arange(length)[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1)


@dataclass(frozen=True)
class Member:
    """One model of a stack."""

    rate: float
    weight_decay: float
    seed: int


@dataclass(frozen=True)
class Budget:
    """What all members share."""

    epochs: int = 200
    batch: int = 128
    precision: str = "fp32"  # or bf16: matmuls and op in bf16, weights and optimiser in fp32
    test_examples: int = TEST_EXAMPLES


examples = functools.lru_cache(maxsize=2)(generate)  # all mixers train on one setting before the next


def decays(name: str) -> bool:
    """Whether a parameter has weight decay: all but biases, norms and the constants of the recurrences."""
    return not any(part in name for part in ("bias", "norm", "A_log", "ssd.D"))


def train_and_score(
    mixer: str,
    setting: Setting,
    members: Sequence[Member],
    budget: Budget,
    device: torch.device,
    backend: str = "auto",
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> list[dict]:
    """Train the stack on one setting and test it; per member: score, accuracy, and the curve of the training loss.

    score is the benchmark's: accuracy per class, averaged over the classes that occur in answers or predictions.
    """
    inputs, targets = (torch.from_numpy(a).to(device) for a in examples(setting, "train", setting.train_examples))
    model = MadModel(mixer, len(members), setting, backend).to(device)
    initialise(model, [m.seed for m in members])
    optimiser = StackedAdamW(model, [m.rate for m in members], [m.weight_decay for m in members], decays=decays)
    per_epoch = math.ceil(len(inputs) / budget.batch)
    steps, every = per_epoch * budget.epochs, max(1, per_epoch * budget.epochs // LOG_POINTS)
    order = torch.Generator().manual_seed(0)
    curves: list[dict[str, list[float]]] = [{"step": [], "loss": []} for _ in members]
    total, counted = torch.zeros(len(members), device=device), 0
    rows, rates = torch.zeros(budget.batch, dtype=torch.long, device=device), torch.empty_like(optimiser.rates)

    def take_step(rows: Tensor) -> None:
        losses = member_losses(model, inputs[rows], targets[rows], budget.precision)
        losses.sum().backward()
        optimiser.step(rates)
        total.add_(losses.detach())

    full_batch = GraphedStep(lambda: take_step(rows), device)
    for epoch in range(budget.epochs):
        half_cosine = (1 + math.cos(math.pi * epoch / budget.epochs)) / 2
        rates.copy_(LOWEST_RATE + (optimiser.rates - LOWEST_RATE) * half_cosine)
        shuffled = torch.randperm(len(inputs), generator=order).to(device)
        for place in range(per_epoch):
            chosen = shuffled[place * budget.batch : (place + 1) * budget.batch]
            if len(chosen) == budget.batch:
                rows.copy_(chosen)
                full_batch()
            else:
                take_step(chosen)
            counted += 1
            step = epoch * per_epoch + place + 1
            if counted == every or step == steps:
                means = (total / counted).tolist()
                for curve, mean in zip(curves, means):
                    curve["step"].append(step)
                    curve["loss"].append(mean)
                progress(step, steps, sorted(means)[len(means) // 2])
                total.zero_()
                counted = 0
    scores, accuracies = score(model, setting, budget, device)
    return [{"score": s, "accuracy": a, "train": c} for s, a, c in zip(scores, accuracies, curves)]


def member_losses(model: MadModel, ids: Tensor, targets: Tensor, precision: str) -> Tensor:
    """[M] mean cross entropy over the asked tokens."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(ids)
    models = logits.shape[0]
    wanted = targets.expand(models, *targets.shape)
    losses = F.cross_entropy(
        logits.float().flatten(0, 2), wanted.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(models, -1)
    return losses.sum(1) / (targets != IGNORED).sum().clamp(min=1)


@torch.no_grad()
def score(model: MadModel, setting: Setting, budget: Budget, device: torch.device) -> tuple[list[float], list[float]]:
    """(mean accuracy over classes, plain accuracy) of each member on the test set."""
    inputs, targets = (torch.from_numpy(a).to(device) for a in examples(setting, "test", budget.test_examples))
    models, vocab = model.embedding.shape[:2]
    right, wanted, guessed = torch.zeros(3, models, vocab, dtype=torch.long, device=device)
    for start in range(0, len(inputs), budget.batch):
        rows = slice(start, start + budget.batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=budget.precision == "bf16"):
            guesses = model(inputs[rows]).argmax(-1).flatten(1)
        asked = targets[rows].flatten() != IGNORED
        answers = targets[rows].flatten()[asked].expand(models, -1)
        guesses = guesses[:, asked]
        wanted.scatter_add_(1, answers, torch.ones_like(answers))
        guessed.scatter_add_(1, guesses, torch.ones_like(guesses))
        right.scatter_add_(1, answers, (answers == guesses).long())
    occurs = (wanted + guessed) > 0
    per_class = right.double() / wanted.clamp(min=1)
    macro = (per_class * occurs).sum(1) / occurs.sum(1)
    return macro.tolist(), (right.sum(1).double() / wanted.sum(1)).tolist()
