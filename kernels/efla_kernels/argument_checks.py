"""Argument checks shared by the public ops: every failure is a ValueError that names expected and got."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 where any input has it, else fp32: 16-bit inputs are up-cast, never multiplied as they are."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """Raise unless `tensor` is floating point and has `shape`, described as `meaning`, e.g. "[B, T, H]"."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {list(shape)} = {meaning}, got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating point tensor, got {tensor.dtype}")


def expect_4d(name: str, tensor: Tensor, meaning: str) -> None:
    """Raise unless `tensor` is a floating point tensor of four dimensions, described as `meaning`."""
    if tensor.dim() != 4 or not tensor.is_floating_point():
        raise ValueError(f"{name}: expected a floating point tensor {meaning}, got {tensor.dtype} {list(tensor.shape)}")


def count_sequences(batch: int, cu_seqlens: Tensor | None) -> int:
    """Number of independent sequences: the batch size, or the segments between the offsets `cu_seqlens`.

    cu_seqlens: 1-D integer offsets [0, ..., T] that never decrease; equal neighbours are an empty segment. Packed
    segments share one row, so a batch above 1 would leave its boundaries undefined and is refused.
    """
    if cu_seqlens is None:
        return batch
    if batch != 1:
        raise ValueError(
            f"cu_seqlens: expected packed input with batch size 1, got batch size {batch}; "
            "flatten the batch to [1, B*T, ...] and give the offsets of the flattened row"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "cu_seqlens: expected a 1-D int32 or int64 tensor of at least 2 offsets, "
            f"got {cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    return cu_seqlens.numel() - 1


def segment_offsets(cu_seqlens: Tensor, tokens: int) -> list[int]:
    """The offsets as ints, checked against the number of tokens (reads them from the device)."""
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != tokens or any(a > b for a, b in pairwise(offsets)):
        shown = offsets if len(offsets) <= 8 else [*offsets[:4], "...", *offsets[-4:]]
        raise ValueError(f"cu_seqlens: expected offsets from 0 to T={tokens} that never decrease, got {shown}")
    return offsets


def expect_state(
    initial_state: Tensor | None, cu_seqlens: Tensor | None, shape: tuple[int, int, int, int], meaning: str
) -> None:
    """Raise unless the initial state, where given, has `shape` [N, H, K, V]; N counts batch rows or segments."""
    if initial_state is not None:
        rows = "segments of cu_seqlens" if cu_seqlens is not None else "batch size"
        expect_shape("initial_state", initial_state, shape, f"{meaning} with N = {rows}")
