"""Short causal depthwise convolution followed by SiLU, for all the channels before a token mixer in one call.

    y_t = silu(bias + sum_j weight[:, W-1-j] * r_{t-j} x_{t-j}),  0 <= j < W

r, `row_scale`, is 1 by default: a norm may leave its factors to this op. The last tap multiplies the current token, as
in torch's Conv1d with left padding. Tokens before the start of a row, or of its document, count as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.argument_checks import count_sequences, expect_shape
from efla_kernels.backends import layer_backend

MOST_TAPS = 4  # of the Triton kernels


def convolution_backend(backend: str, x: Tensor, taps: int) -> str:
    """Which form serves x: that of `layer_backend`, and PyTorch beyond four taps."""
    return layer_backend(backend, x) if taps <= MOST_TAPS else "torch"


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    widths: Sequence[int] | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    row_scale: Tensor | None = None,
    last_apart: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """Convolve and activate x; returns the output cut into `widths` along the channels, in x's dtype.

    Args:
        x: [B, T, D], the inputs of all parts side by side (q, k and v, or Mamba-2's x, B and C); a slice of a wider
            projection needs no copy.
        weight, bias: [D, W] and [D] (or None), of any floating type.
        widths: up to three numbers of channels that add up to D; [D] by default. On Triton the parts are separate
            contiguous tensors, and their gradients need not be joined.
        state: the W-1 inputs before x, [B, W-1, D]; zeros if None. See `convolution_state` for the next one.
        cu_seqlens: [N+1] offsets of documents packed into one row (B = 1), which no tap crosses; not with a state.
        row_scale: fp32 [B, T], a factor for each row of x that is applied in fp32 as x is read; not with a state. It
            counts as a constant: x's gradient has it in it, and it gets none itself.
        last_apart: the last part is an op of its own in what torch.compile and checkpointing see, so that the others
            can be computed again without it: the backward pass of some rules reads q and k, but not v.
        backend: see `convolution_backend`.

    Raises:
        ValueError: for shapes that do not fit, a state in a packed row or with row_scale, a row_scale that is not fp32.
    """
    widths = [x.shape[-1]] if widths is None else list(widths)
    _check(x, weight, bias, widths, state, cu_seqlens, row_scale)
    starts = None if cu_seqlens is None else _starts(cu_seqlens, x.shape[1])
    row_scale = None if row_scale is None else row_scale.detach()
    if convolution_backend(backend, x, weight.shape[1]) == "torch" or x.numel() == 0:
        return _torch(x, weight, bias, state, starts, row_scale).split(widths, -1)
    from efla_kernels.layers.convolution_op import convolve  # triton is there wherever it is chosen

    if state is not None:
        state = state.to(x.dtype)
    if x.is_cuda:
        return convolve(x, weight, bias, state, starts, row_scale, widths, last_apart)
    # the interpreter rounds to 16 bits by truncation: nothing of 16 bits reaches it
    bias, state = (None if t is None else t.float() for t in (bias, state))
    parts = convolve(x.float(), weight.float(), bias, state, starts, row_scale, widths, last_apart)
    return tuple(y.to(x.dtype) for y in parts)


def convolution_state(x: Tensor, taps: int, state: Tensor | None = None) -> Tensor:
    """The last W-1 inputs after x, [B, W-1, D]: a view of x (clone it to keep it) where x is that long."""
    B, T, D = x.shape
    gap = taps - 1
    if gap <= T:
        return x[:, T - gap :]
    if state is None:
        state = x.new_zeros(B, gap, D)
    return torch.cat((state.to(x.dtype), x), 1)[:, T:]


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: list[int],
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    row_scale: Tensor | None,
) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(f"x: expected a floating point tensor [B, T, D], got {x.dtype} {list(x.shape)}")
    B, T, D = x.shape
    if weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError(f"weight: expected [D, W] with W of at least 1, got {list(weight.shape)}")
    W = weight.shape[1]
    expect_shape("weight", weight, (D, W), "[D, W]")
    if bias is not None:
        expect_shape("bias", bias, (D,), "[D]")
    if not 1 <= len(widths) <= 3 or any(width < 1 for width in widths) or sum(widths) != D:
        raise ValueError(f"widths: expected one to three positive numbers that add up to D={D}, got {widths}")
    count_sequences(B, cu_seqlens)
    if state is not None:
        if cu_seqlens is not None:
            raise ValueError("state: documents of a packed row (cu_seqlens) start from nothing; give one of the two")
        if row_scale is not None:
            raise ValueError("row_scale: a state holds inputs without factors; scale x itself where there is a state")
        expect_shape("state", state, (B, W - 1, D), "[B, W-1, D]")
    if row_scale is not None:
        expect_shape("row_scale", row_scale, (B, T), "[B, T]")
        if row_scale.dtype != torch.float32:
            raise ValueError(f"row_scale: expected torch.float32, got {row_scale.dtype}")


def _starts(cu_seqlens: Tensor, T: int) -> Tensor:
    """int32 [T]: the first token of each token's document."""
    document = torch.searchsorted(cu_seqlens, torch.arange(T, device=cu_seqlens.device), right=True) - 1
    return cu_seqlens[document].to(torch.int32)


def _torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    row_scale: Tensor | None,
) -> Tensor:
    """The same in PyTorch's own operations."""
    T, W, dtype = x.shape[1], weight.shape[1], x.dtype
    if row_scale is not None:
        x = x * row_scale[..., None]  # fp32 from here on, fp64 for fp64
    gap = W - 1
    padded = F.pad(x, (0, 0, gap, 0)) if state is None else torch.cat((state.to(x.dtype), x), 1)
    if x.is_cuda or starts is not None or T <= 1:
        # Products and shifts: cuDNN's depthwise weight gradient is slow, a call of it costs more than the four products
        # of a decoded token, and taps that reach another document can be left out one by one.
        y = _shifted_products(padded, weight, T, starts)
        y = y if bias is None else y + bias.to(y.dtype)
        return F.silu(y).to(dtype)
    # rounded to x's dtype, which conv1d asks of them where no factors have made x fp32
    factors = weight[:, None].to(dtype).to(padded.dtype)
    shift = None if bias is None else bias.to(dtype).to(padded.dtype)
    y = F.conv1d(padded.transpose(1, 2), factors, shift, groups=weight.shape[0])
    # contiguous before SiLU: its backward would otherwise walk two layouts at once
    return F.silu(y.transpose(1, 2).contiguous()).to(dtype)


def _shifted_products(padded: Tensor, weight: Tensor, T: int, starts: Tensor | None) -> Tensor:
    """sum_j weight[:, W-1-j] * x_{t-j} in fp32 (fp64 for fp64); padded [B, W-1 + T, D]."""
    dtype = torch.float64 if padded.dtype == torch.float64 else torch.float32
    gap, factors = weight.shape[1] - 1, weight.to(dtype)
    y = padded[:, gap:].to(dtype) * factors[:, gap]
    for j in range(1, gap + 1):
        term = padded[:, gap - j : gap - j + T].to(dtype) * factors[:, gap - j]
        if starts is not None:
            inside = torch.arange(T, device=starts.device) - j >= starts
            term = term * inside[:, None]
        y = y + term
    return y
