"""Seeded inputs and errors against float64 of convolution and loss: `accuracy.Case` for the layers around mixers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.layers.convolution import short_convolution
from efla_kernels.layers.cross_entropy import logit_rows

CONSTANTS = ("dy", "row_scale")  # inputs without a gradient


@dataclass(frozen=True)
class ConvolutionCase:
    """One call of `short_convolution`. x is a slice of a wider tensor, as in Mamba-2's projection."""

    dtype: torch.dtype = torch.float32
    batch: int = 2
    tokens: int = 70
    widths: tuple[int, ...] = (16, 24, 8)
    taps: int = 4
    bias: bool = False
    state: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    scaled: bool = False  # rows have factors
    op: str = "convolution"
    key_width: int = 16
    value_width: int = 16

    def inputs(self, seed: int, device: torch.device | str) -> dict[str, Tensor]:
        """x, weight, bias, state and row_scale as they are needed, and dy."""
        generator = torch.Generator().manual_seed(seed)
        D = sum(self.widths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, self.dtype)

        tensors = {"x": normal(self.batch, self.tokens, D + 16)[:, :, 8 : 8 + D], "weight": normal(D, self.taps)}
        if self.bias:
            tensors["bias"] = normal(D)
        if self.state:
            tensors["state"] = normal(self.batch, self.taps - 1, D)
        if self.scaled:
            factors = torch.exp2(4 * torch.rand(self.batch, self.tokens, generator=generator) - 2)
            tensors["row_scale"] = factors.to(device)
        return tensors | {"dy": normal(self.batch, self.tokens, D)}

    def run(self, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
        """y of all parts side by side and the gradients of all inputs."""
        leaves = _leaves(tensors)
        packing = None
        if self.cu_seqlens is not None:
            packing = torch.tensor(self.cu_seqlens, device=tensors["dy"].device)
        x, weight = leaves["x"], leaves["weight"]
        parts = short_convolution(
            x, weight, leaves.get("bias"), widths=self.widths, state=leaves.get("state"), cu_seqlens=packing,
            row_scale=tensors.get("row_scale"), backend=backend,
        )  # fmt: skip
        return _with_gradients("y", torch.cat(parts, -1), leaves, tensors["dy"])

    def truth(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The definition in float64 from the same rounded inputs."""
        leaves = _leaves({name: x.double() for name, x in tensors.items()})
        x, weight = leaves["x"], leaves["weight"]
        if self.scaled:
            x = x * tensors["row_scale"].double()[..., None]
        before = leaves["state"] if self.state else x.new_zeros(x.shape[0], self.taps - 1, x.shape[2])
        rows = []
        for start, end in pairwise(self.cu_seqlens or (0, self.tokens)):
            if start < end:
                windows = torch.cat((before, x[:, start:end]), 1).unfold(1, self.taps, 1)
                rows.append((windows * weight).sum(-1))
        z = torch.cat(rows, 1)
        y = F.silu(z + leaves["bias"] if self.bias else z)
        return _with_gradients("y", y, leaves, tensors["dy"].double())

    def errors(self, backend: str, device: str = "cpu") -> dict[str, float]:
        """Relative error of y and of every gradient."""
        tensors = self.inputs(0, device)
        got, expected = self.run(tensors, backend), self.truth(tensors)
        return {name: ((got[name] - x).norm() / x.norm().clamp(min=1e-30)).item() for name, x in expected.items()}


@dataclass(frozen=True)
class LossCase:
    """The fused loss of N tokens, width `key_width`, V = `value_width`; every ninth target is ignored."""

    dtype: torch.dtype = torch.bfloat16
    tokens: int = 5000
    key_width: int = 256
    value_width: int = 32000
    spread: float = 1.0  # of the logits
    op: str = "loss"

    def inputs(self, seed: int, device: torch.device | str) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        N, D, V = self.tokens, self.key_width, self.value_width
        targets = torch.randint(V, (N,), generator=generator)
        targets[::9] = -100
        hidden = torch.randn(N, D, generator=generator) * self.spread
        weight = torch.randn(V, D, generator=generator) / D**0.5
        return {
            "hidden": hidden.to(device, self.dtype), "weight": weight.to(device, self.dtype),
            "targets": targets.to(device),
        }  # fmt: skip

    def run(self, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
        """The sum over tokens and its gradients; `backend` is "triton", the only one that is fused."""
        from efla_kernels.layers.cross_entropy_kernels import fused_linear_cross_entropy

        assert backend == "triton"
        leaves = _leaves(tensors)
        loss = fused_linear_cross_entropy(
            leaves["hidden"], leaves["weight"], tensors["targets"], logit_rows(self.tokens, self.value_width)
        )
        return _with_gradients("loss", loss, leaves, torch.ones_like(loss))

    def truth(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same in float64 from the rounded inputs."""
        leaves = _leaves({name: x.double() if x.is_floating_point() else x for name, x in tensors.items()})
        logits = leaves["hidden"] @ leaves["weight"].t()
        loss = F.cross_entropy(logits, tensors["targets"], ignore_index=-100, reduction="sum")
        return _with_gradients("loss", loss, leaves, torch.ones_like(loss))


def _leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that have a gradient, as leaves of a new graph."""
    named = {name: x for name, x in tensors.items() if name not in CONSTANTS and x.is_floating_point()}
    return {name: x.detach().requires_grad_() for name, x in named.items()}


def _with_gradients(name: str, y: Tensor, leaves: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {name: y.detach(), **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}}
