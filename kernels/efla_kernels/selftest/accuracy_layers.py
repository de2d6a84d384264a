"""Cases of the layers around the mixers: the convolution and the fused loss."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.layers.convolution import short_convolution
from efla_kernels.layers.cross_entropy import logit_rows
from efla_kernels.selftest.accuracy import BF16, FP16, FP32, Checked, Draw, Tensors, as_leaves, cast, with_gradients

CONSTANTS = ("dy", "row_scale")  # inputs without a gradient
LOSS_BOUND = 1e-5
# results are rounded once from fp32 sums; the loss also rounds G, an operand of its matmuls
LAYER_BOUNDS = {BF16: 4e-3, FP16: 1e-3, FP32: 1e-5}


class LayerCase(Checked):
    """A case with the layers' bounds."""

    def bound(self, output: str) -> float:
        """The largest relative error allowed for one output or gradient."""
        return LOSS_BOUND if output == "loss" else LAYER_BOUNDS[self.dtype]


@dataclass(frozen=True)
class ConvolutionCase(LayerCase):
    """One call of `short_convolution`. x is a slice of a wider tensor, as in Mamba-2's projection."""

    dtype: torch.dtype = FP32
    batch: int = 2
    tokens: int = 70
    widths: tuple[int, ...] = (16, 24, 8)
    kernel_size: int = 4
    bias: bool = False
    state: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    scaled: bool = False  # with row_scale
    op: str = "convolution"
    key_width: int = 16
    value_width: int = 16

    def inputs(self, seed: int, device: torch.device | str) -> Tensors:
        """x, weight, and bias, state and row_scale where the case has them; and dy."""
        draw, D = Draw(seed), sum(self.widths)

        def normal(*shape: int) -> Tensor:
            return draw.normal(*shape).to(device, self.dtype)

        x = normal(self.batch, self.tokens, D + 16)[:, :, 8 : 8 + D]
        tensors = {"x": x, "weight": normal(D, self.kernel_size)}
        if self.bias:
            tensors["bias"] = normal(D)
        if self.state:
            tensors["state"] = normal(self.batch, self.kernel_size - 1, D)
        if self.scaled:
            tensors["row_scale"] = torch.exp2(4 * draw.uniform(self.batch, self.tokens) - 2).to(device)
        return tensors | {"dy": normal(self.batch, self.tokens, D)}

    def run(self, tensors: Tensors, backend: str, dtype: torch.dtype | None = None) -> Tensors:
        """y of all parts side by side and the gradients of all inputs."""
        leaves, packing = as_leaves(cast(tensors, dtype), CONSTANTS), None
        if self.cu_seqlens is not None:
            packing = torch.tensor(self.cu_seqlens, device=tensors["dy"].device)
        parts = short_convolution(
            leaves["x"], leaves["weight"], leaves.get("bias"), widths=self.widths, state=leaves.get("state"),
            cu_seqlens=packing, row_scale=tensors.get("row_scale"), backend=backend,
        )  # fmt: skip
        return with_gradients({"y": torch.cat(parts, -1)}, leaves, [tensors["dy"]])

    def truth(self, tensors: Tensors) -> Tensors:
        """The definition in float64 from the same rounded inputs."""
        leaves = as_leaves(cast(tensors, torch.float64), CONSTANTS)
        x, weight, gap = leaves["x"], leaves["weight"], self.kernel_size - 1
        if self.scaled:
            x = x * tensors["row_scale"].double()[..., None]
        before = leaves["state"] if self.state else x.new_zeros(x.shape[0], gap, x.shape[2])
        rows = []
        for start, end in pairwise(self.cu_seqlens or (0, self.tokens)):
            if start < end:
                neighbours = torch.cat((before, x[:, start:end]), 1).unfold(1, self.kernel_size, 1)
                rows.append((neighbours * weight).sum(-1))
        z = torch.cat(rows, 1)
        y = F.silu(z + leaves["bias"] if self.bias else z)
        return with_gradients({"y": y}, leaves, [tensors["dy"]])


@dataclass(frozen=True)
class LossCase(LayerCase):
    """The fused loss of N tokens, width `key_width`, V = `value_width`; every ninth target is ignored."""

    dtype: torch.dtype = BF16
    tokens: int = 5000
    key_width: int = 256
    value_width: int = 32000
    spread: float = 1.0  # of the logits
    op: str = "loss"

    def inputs(self, seed: int, device: torch.device | str) -> Tensors:
        """hidden, weight and targets."""
        draw, N, D, V = Draw(seed), self.tokens, self.key_width, self.value_width
        targets = torch.randint(V, (N,), **draw.options)
        targets[::9] = -100
        hidden = draw.normal(N, D) * self.spread
        weight = draw.normal(V, D) / D**0.5
        floats = {"hidden": hidden.to(device, self.dtype), "weight": weight.to(device, self.dtype)}
        return floats | {"targets": targets.to(device)}

    def run(self, tensors: Tensors, backend: str, dtype: torch.dtype | None = None) -> Tensors:
        """The sum over tokens and its gradients: by the kernels for backend "triton", else by PyTorch."""
        leaves = as_leaves(cast(tensors, dtype), ())
        hidden, weight, targets = leaves["hidden"], leaves["weight"], tensors["targets"]
        if backend == "triton":
            from efla_kernels.layers.cross_entropy_kernels import fused_linear_cross_entropy

            loss = fused_linear_cross_entropy(hidden, weight, targets, logit_rows(len(hidden), len(weight)))
        else:
            loss = F.cross_entropy(hidden @ weight.t(), targets, ignore_index=-100, reduction="sum")
        return with_gradients({"loss": loss}, leaves, [torch.ones_like(loss)])
