"""The short convolution in PyTorch's own operations, and the inputs that it shares with the kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Inputs(NamedTuple):
    """Inputs of both forms, as `short_convolution` checked them."""

    x: Tensor  # [B, T, D]
    weight: Tensor  # [D, W]
    bias: Tensor | None  # [D]
    state: Tensor | None  # [B, W-1, D], the inputs before x
    starts: Tensor | None  # int32 [T], the first token of each token's document; packed rows only
    row_scale: Tensor | None  # fp32 [B, T]
    widths: list[int]  # channels of each part


def convolve(i: Inputs) -> tuple[Tensor, ...]:
    """The parts y [B, T, width] in x's dtype; any kernel size, fp64 included."""
    x, weight, T, dtype = i.x, i.weight, i.x.shape[1], i.x.dtype
    if i.row_scale is not None:
        x = x * i.row_scale[..., None]  # fp32 from here on, fp64 for fp64
    gap = weight.shape[1] - 1
    padded = F.pad(x, (0, 0, gap, 0)) if i.state is None else torch.cat((i.state.to(x.dtype), x), 1)
    if x.is_cuda or i.starts is not None or T <= 1:
        # On a GPU the weight gradient of cuDNN's depthwise convolution is slow. For one decoded token conv1d costs more
        # than W products of shifted rows. Those can also leave out tokens of another document.
        z = _shifted_products(padded, i)
        z = z if i.bias is None else z + i.bias.to(z.dtype)
    else:
        # conv1d wants its weights in x's dtype; they are rounded to the input's also where row_scale made x fp32
        kernel = weight[:, None].to(dtype).to(padded.dtype)
        bias = None if i.bias is None else i.bias.to(dtype).to(padded.dtype)
        z = F.conv1d(padded.transpose(1, 2), kernel, bias, groups=weight.shape[0])
        # SiLU's backward is slow where its input and gradient differ in layout
        z = z.transpose(1, 2).contiguous()
    return F.silu(z).to(dtype).split(i.widths, -1)


def _shifted_products(padded: Tensor, i: Inputs) -> Tensor:
    """sum_j weight[:, W-1-j] * x_{t-j} in fp32 (fp64 for fp64); padded: [B, W-1 + T, D]."""
    dtype = torch.float64 if padded.dtype == torch.float64 else torch.float32
    T, gap, weight = i.x.shape[1], i.weight.shape[1] - 1, i.weight.to(dtype)
    y = padded[:, gap:].to(dtype) * weight[:, gap]
    for j in range(1, gap + 1):
        term = padded[:, gap - j : gap - j + T].to(dtype) * weight[:, gap - j]
        if i.starts is not None:
            inside = torch.arange(T, device=i.starts.device) - j >= i.starts
            term = term * inside[:, None]
        y = y + term
    return y
