"""Short causal depthwise convolution followed by SiLU, for all the channels before a token mixer in one call.

    y_t = silu(bias + sum_j weight[:, W-1-j] * r_{t-j} x_{t-j}),  0 <= j < W

W is the kernel size. weight[:, W-1] multiplies the current token, as in torch's Conv1d with left padding. Tokens before
the start of a row, or of its document, count as zeros. r is `row_scale`, by default 1; see `norm_linear`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from efla_kernels.argument_checks import count_sequences, expect_shape
from efla_kernels.backends import layer_backend
from efla_kernels.layers import convolution_torch
from efla_kernels.layers.convolution_torch import Inputs

LARGEST_KERNEL = 4  # the largest kernel size of the Triton kernels


def convolution_backend(backend: str, x: Tensor, kernel_size: int) -> str:
    """The form that serves x: that of `layer_backend`, and PyTorch for kernel sizes above 4."""
    return layer_backend(backend, x) if kernel_size <= LARGEST_KERNEL else "torch"


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
        cu_seqlens: [N+1] offsets of documents packed into one row (B = 1); no document reads another's tokens. Not with
            a state.
        row_scale: fp32 [B, T], a factor for each row of x, applied in fp32 as x is read; not with a state. It gets no
            gradient; x's gradient contains it.
        last_apart: under torch.compile and activation checkpointing the last part is an op of its own. The others can
            then be recomputed without it: the backward pass of some rules reads q and k, but not v.
        backend: see `convolution_backend`.

    Raises:
        ValueError: for shapes that do not fit, a state in a packed row or with row_scale, a row_scale that is not fp32.
    """
    widths = [x.shape[-1]] if widths is None else list(widths)
    row_scale = None if row_scale is None else row_scale.detach()
    inputs = Inputs(x, weight, bias, state, None, row_scale, widths)
    _check(inputs, cu_seqlens)
    if cu_seqlens is not None:
        inputs = inputs._replace(starts=_starts(cu_seqlens, x.shape[1]))
    if convolution_backend(backend, x, weight.shape[1]) == "torch" or x.numel() == 0:
        return convolution_torch.convolve(inputs)
    from efla_kernels.layers.convolution_op import convolve  # Triton is installed wherever it is chosen

    if state is not None:
        inputs = inputs._replace(state=state.to(x.dtype))
    if x.is_cuda:
        return convolve(inputs, last_apart)
    # Triton's interpreter truncates when it rounds to 16 bits, so it gets fp32
    wide = (t.float() if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs)
    parts = convolve(Inputs._make(wide), last_apart)
    return tuple(y.to(x.dtype) for y in parts)


def convolution_state(x: Tensor, kernel_size: int, state: Tensor | None = None) -> Tensor:
    """The last W-1 inputs up to the end of x, [B, W-1, D]; a view of x (clone it to keep it) where x is that long."""
    B, T, D = x.shape
    gap = kernel_size - 1
    if gap <= T:
        return x[:, T - gap :]
    if state is None:
        state = x.new_zeros(B, gap, D)
    return torch.cat((state.to(x.dtype), x), 1)[:, T:]


def _check(i: Inputs, cu_seqlens: Tensor | None) -> None:
    if i.x.dim() != 3 or not i.x.is_floating_point():
        raise ValueError(f"x: expected a floating point tensor [B, T, D], got {i.x.dtype} {list(i.x.shape)}")
    B, T, D = i.x.shape
    if i.weight.dim() != 2 or i.weight.shape[1] < 1:
        raise ValueError(f"weight: expected [D, W] with W of at least 1, got {list(i.weight.shape)}")
    W = i.weight.shape[1]
    expect_shape("weight", i.weight, (D, W), "[D, W]")
    if i.bias is not None:
        expect_shape("bias", i.bias, (D,), "[D]")
    if not 1 <= len(i.widths) <= 3 or any(width < 1 for width in i.widths) or sum(i.widths) != D:
        raise ValueError(f"widths: expected one to three positive numbers that add up to D={D}, got {i.widths}")
    count_sequences(B, cu_seqlens)
    if i.state is not None:
        if cu_seqlens is not None:
            raise ValueError("state: documents of a packed row (cu_seqlens) start from nothing; give one of the two")
        if i.row_scale is not None:
            raise ValueError("row_scale: a state holds unscaled inputs; scale x itself where there is a state")
        expect_shape("state", i.state, (B, W - 1, D), "[B, W-1, D]")
    if i.row_scale is not None:
        expect_shape("row_scale", i.row_scale, (B, T), "[B, T]")
        if i.row_scale.dtype != torch.float32:
            raise ValueError(f"row_scale: expected torch.float32, got {i.row_scale.dtype}")


def _starts(cu_seqlens: Tensor, T: int) -> Tensor:
    """int32 [T]: the first token of each token's document."""
    document = torch.searchsorted(cu_seqlens, torch.arange(T, device=cu_seqlens.device), right=True) - 1
    return cu_seqlens[document].to(torch.int32)
