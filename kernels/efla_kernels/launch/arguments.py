"""How tensors reach the kernels: rows as they want them, offsets of packed segments, tensor descriptors."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor


class Packing(NamedTuple):
    """Offsets of packed segments for the kernels; the inputs stand in where rows are equal (never read)."""

    cu_seqlens: Tensor
    first_chunk: Tensor
    chunk_sequence: Tensor


def pack(cu_seqlens: Tensor | None, rows: int, chunks: int, stand_in: Tensor) -> Packing:
    """Chunk numbers of packed segments, computed on the device so that the host never waits.

    rows: tokens per chunk; chunks: slots for chunks, of which those that no segment fills belong to sequence -1.
    """
    if cu_seqlens is None:
        return Packing(stand_in, stand_in, stand_in)
    counts = (cu_seqlens.diff() + rows - 1) // rows
    ends = counts.cumsum(0)
    owner = torch.searchsorted(ends, torch.arange(chunks, device=cu_seqlens.device), right=True)
    owner = torch.where(owner < counts.shape[0], owner, -1)
    return Packing(cu_seqlens.to(torch.int32), (ends - counts).to(torch.int32), owner.to(torch.int32))


def power_of_two(n: int) -> int:
    """The least power of two that is n >= 1 or more; triton.next_power_of_2 takes longer than some launches."""
    return 1 << (n - 1).bit_length()


def rows_in_place(x: Tensor) -> Tensor:
    """x [B, T, ...] with unit last stride and rows of one batch right behind those of the one before; else a copy."""
    batch, row, *_, last = x.stride()
    fine = last == 1 and (x.shape[0] == 1 or batch == x.shape[1] * row)
    # contiguous() would hand back x itself where T = 1 and the stride of tokens is any number
    return x if fine else x.clone(memory_format=torch.contiguous_format)


def use_descriptors(*tensors: Tensor) -> bool:
    """Whether tensor descriptors can be made of 16-bit x [B, T, H, D] on a GPU: all rows multiples of 16 bytes.

    Descriptors are made in the kernels, from memory that Triton asks for here; its allocator belongs to a thread, and
    autograd's backward has one of its own.
    """
    for x in tensors:
        _, row, head, _ = x.stride()
        if not x.is_cuda or x.data_ptr() % 16 or x.shape[3] % 8 or row % 8 or head % 8:
            return False
    triton.set_allocator(_allocate)
    return True


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    """Memory on the current device, which is where kernels are launched."""
    return torch.empty(size, device="cuda", dtype=torch.int8)
