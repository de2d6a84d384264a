"""Linear layers, norms and AdamW for M models at once.

Every parameter is [M, ...] for M models and every activation [M, B, T, ...]. The models share nothing: the gradient of
the sum of their losses is each model's own gradient, and a model that diverges leaves the others as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from efla_lm.models.init import name_seed

Draw = Callable[[tuple[int, ...], Generator], Tensor]


def zeros(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.zeros(shape)


def ones(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.ones(shape)


def constant(value: float) -> Draw:
    return lambda shape, generator: torch.full(shape, value)


def normal(std: float) -> Draw:
    return lambda shape, generator: torch.empty(shape).normal_(0.0, std, generator=generator)


def uniform(bound: float) -> Draw:
    """U(-bound, bound); torch draws linear and convolution layers with bound = fan_in**-0.5."""
    return lambda shape, generator: torch.empty(shape).uniform_(-bound, bound, generator=generator)


def xavier(inputs: int, outputs: int) -> Draw:
    """Xavier's uniform rule."""
    return uniform(math.sqrt(6 / (inputs + outputs)))


class StackedModule(nn.Module):
    """A module that knows how each of its parameters is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: dict[str, Draw] = {}

    def add(self, name: str, models: int, shape: tuple[int, ...], draw: Draw) -> nn.Parameter:
        """A parameter [M, *shape]; `draw(shape, generator)` gives the values of one model."""
        parameter = nn.Parameter(torch.empty(models, *shape))
        self.register_parameter(name, parameter)
        self.draws[name] = draw
        return parameter


@torch.no_grad()
def initialise(model: nn.Module, seeds: Sequence[int]) -> None:
    """Draw every parameter of model m from (seeds[m], parameter name): models of one seed start alike."""
    for prefix, module in model.named_modules():
        if not isinstance(module, StackedModule):
            continue
        for name, draw in module.draws.items():
            parameter = getattr(module, name)
            for share, seed in zip(parameter, seeds, strict=True):
                generator = torch.Generator().manual_seed(name_seed(seed, f"{prefix}.{name}"))
                share.copy_(draw(tuple(share.shape), generator))


class StackedLinear(StackedModule):
    """y[m] = x[m] W[m] (+ b[m]); x [M, ..., inputs]."""

    def __init__(
        self, models: int, inputs: int, outputs: int, *, bias: bool, draw: Draw | None = None, bias_draw: Draw = zeros
    ) -> None:
        super().__init__()
        self.weight = self.add("weight", models, (inputs, outputs), draw or uniform(inputs**-0.5))
        self.bias = self.add("bias", models, (1, outputs), bias_draw) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(1, -2)
        y = torch.bmm(rows, self.weight) if self.bias is None else torch.baddbmm(self.bias, rows, self.weight)
        return y.unflatten(1, x.shape[1:-1])


class StackedNorm(StackedModule):
    """RMSNorm, or LayerNorm with `center`, over the last dimension of [M, ..., size]."""

    def __init__(self, models: int, size: int, eps: float, center: bool = False) -> None:
        super().__init__()
        self.eps, self.size = eps, size
        self.weight = self.add("weight", models, (size,), ones)
        self.bias = self.add("bias", models, (size,), zeros) if center else None

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], *[1] * (x.ndim - 2), self.size)
        if self.bias is None:
            return F.rms_norm(x, (self.size,), eps=self.eps) * self.weight.view(shape)
        return F.layer_norm(x, (self.size,), eps=self.eps) * self.weight.view(shape) + self.bias.view(shape)


class StackedAdamW:
    """AdamW [Loshchilov and Hutter] with a learning rate, a weight decay and a clipped gradient norm for each model.

    Equal, model by model, to `torch.optim.AdamW` after `clip_grad_norm_`. The parameters of `model` become views of one
    matrix [M, P], so that a step takes a dozen operations. All state is on the device, so that a CUDA graph can hold a
    step.
    """

    def __init__(
        self,
        model: nn.Module,
        rates: Sequence[float],
        weight_decay: Sequence[float],
        *,
        decays: Callable[[str], bool] = lambda name: True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        clip_norm: float | None = None,
    ) -> None:
        named = list(model.named_parameters())
        self.parameters = [p for _, p in named]
        device, models = self.parameters[0].device, len(rates)
        if any(p.shape[0] != models for p in self.parameters):
            raise ValueError(f"rates: expected one per model ({self.parameters[0].shape[0]}), got {models}")
        self.flat = torch.cat([p.detach().flatten(1) for p in self.parameters], 1).contiguous()
        mask, start = [], 0
        for name, p in named:
            size = p[0].numel()
            p.data = self.flat[:, start : start + size].view(p.shape)
            mask.append(torch.full((size,), float(decays(name))))
            start += size
        self.rates = torch.tensor(rates, device=device, dtype=torch.float32)[:, None]
        shrink = torch.tensor(weight_decay, dtype=torch.float32)[:, None] * torch.cat(mask)
        self.shrink = shrink.to(device)
        self.first, self.second = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.betas, self.eps, self.clip_norm = betas, eps, clip_norm
        self.steps = torch.zeros((), dtype=torch.float64, device=device)  # fp64: 1 - 0.999^n keeps its digits

    @torch.no_grad()
    def step(self, rates: Tensor | None = None) -> None:
        """One step at `rates` [M, 1] (None: the rates given at the start); clears the gradients."""
        rates = self.rates if rates is None else rates
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        gradient = torch.cat([g.flatten(1) for g in gradients], 1)
        if self.clip_norm is not None:
            norm = gradient.norm(dim=1, keepdim=True)
            gradient *= (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        self.steps += 1
        first, second = self.betas
        self.first.lerp_(gradient, 1 - first)
        self.second.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        spread = (self.second / (1 - second**self.steps).float()).sqrt_().add_(self.eps)
        self.flat.mul_(1 - rates * self.shrink)
        self.flat.sub_(self.first / spread * (rates / (1 - first**self.steps).float()))
        for parameter in self.parameters:
            parameter.grad = None
