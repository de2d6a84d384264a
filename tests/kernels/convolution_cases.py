"""Inputs of the short convolution and its definition in float64, shared by the tests of its forms."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from efla_kernels import short_convolution
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call. The inputs are a slice of a wider tensor, as in Mamba-2's projection."""

    batch: int = 2
    tokens: int = 70
    widths: tuple[int, ...] = (16, 24, 8)
    taps: int = 4
    bias: bool = False
    state: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32

    def inputs(self, device: str = "cpu") -> tuple[dict[str, Tensor], Tensor]:
        """Seeded arguments by name, and dy."""
        generator = torch.Generator().manual_seed(self.tokens + self.taps)
        D = sum(self.widths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, self.dtype)

        tensors = {"x": normal(self.batch, self.tokens, D + 16)[:, :, 8 : 8 + D], "weight": normal(D, self.taps)}
        if self.bias:
            tensors["bias"] = normal(D)
        if self.state:
            tensors["state"] = normal(self.batch, self.taps - 1, D)
        return tensors, normal(self.batch, self.tokens, D)

    def run(self, tensors: dict[str, Tensor], dy: Tensor, backend: str) -> dict[str, Tensor]:
        """y of all parts side by side and the gradients of all inputs."""
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        packing = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens, device=dy.device)
        parts = short_convolution(**leaves, widths=self.widths, cu_seqlens=packing, backend=backend)
        assert [part.shape[-1] for part in parts] == list(self.widths)
        return _with_gradients(torch.cat(parts, -1), leaves, dy)

    def truth(self, tensors: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
        """The definition in float64, token by token, from the same rounded inputs."""
        leaves = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
        x, weight = leaves["x"], leaves["weight"]
        before = leaves["state"] if self.state else x.new_zeros(x.shape[0], self.taps - 1, x.shape[2])
        rows = []
        for start, end in pairwise(self.cu_seqlens or (0, self.tokens)):
            window = torch.cat((before, x[:, start:end]), 1)
            rows += [(window[:, t : t + self.taps] * weight.T).sum(1) for t in range(end - start)]
        z = torch.stack(rows, 1)
        return _with_gradients(F.silu(z + leaves["bias"] if self.bias else z), leaves, dy.double())

    def errors(self, backend: str, device: str = "cpu") -> dict[str, float]:
        """Relative error of y and of every gradient."""
        tensors, dy = self.inputs(device)
        got, expected = self.run(tensors, dy, backend), self.truth(tensors, dy)
        return {name: ((got[name] - x).norm() / x.norm().clamp(min=1e-30)).item() for name, x in expected.items()}


def _with_gradients(y: Tensor, leaves: dict[str, Tensor], dy: Tensor) -> dict[str, Tensor]:
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}}


CASES = {
    "off the strips": Case(),
    "one part, off the channel block": Case(widths=(130,), state=True),
    "whole channel blocks": Case(batch=1, tokens=130, widths=(128, 128, 128), bias=True),
    "two strips and a token": Case(batch=3, tokens=65, widths=(16, 16), bias=True, state=True),
    "shorter than the taps": Case(batch=3, tokens=2, widths=(16, 8), bias=True, state=True),
    "one token": Case(tokens=1, bias=True, state=True),
    "three taps": Case(batch=1, taps=3, state=True, bias=True),
    "two taps": Case(batch=1, taps=2, state=True),
    "one tap": Case(batch=1, tokens=9, taps=1, bias=True),
    "packed": Case(batch=1, tokens=75, bias=True, cu_seqlens=(0, 0, 5, 6, 6, 75, 75)),
    "packed across strips": Case(batch=1, tokens=200, cu_seqlens=(0, 64, 65, 67, 127, 130, 200)),
}
