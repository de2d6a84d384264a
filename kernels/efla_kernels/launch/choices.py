"""What the launches of all families share: block shapes, the operands' type, the device they are chosen for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the inputs of ops that run on Triton


class Block(NamedTuple):
    """Columns of a program, warps, stages of the software pipeline, most registers of a thread (0: no limit)."""

    columns: int
    warps: int
    stages: int
    registers: int = 0


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def processors(x: Tensor) -> int:
    """Multiprocessors of the GPU that x is on; elsewhere those of an H200, which the block shapes were measured on."""
    return torch.cuda.get_device_properties(x.get_device()).multi_processor_count if x.device.type == "cuda" else 132


def expect_triton(x: Tensor, dtypes: dict[str, torch.dtype]) -> None:
    """Raise unless Triton can run on x's device and the tensors have one type among `DTYPES`; dtypes: by name."""
    if len(set(dtypes.values())) > 1 or x.dtype not in DTYPES:
        raise ValueError(
            f"backend triton: expected {', '.join(dtypes)} of one type among {DTYPES}, got "
            f"{', '.join(map(str, dtypes.values()))}"
        )
    if not (x.is_cuda or interpreted()):
        raise ValueError(
            f"backend triton: expected CUDA tensors, got {x.device}; use backend=torch (or TRITON_INTERPRET=1)"
        )


@dataclass(frozen=True)
class Problem:
    """Shapes and options that all launches of one call share; families add their own and what follows from them."""

    batch: int
    tokens: int
    heads: int
    sequences: int  # batch, or the segments of a packed row
    dtype: torch.dtype  # of the inputs
    packed: bool

    def chunk_slots(self, chunk: int) -> int:
        """Slots for data of chunks of `chunk` tokens: exact for equal rows, an upper bound for packed segments."""
        return self.tokens // chunk + self.sequences if self.packed else self.batch * -(-self.tokens // chunk)

    @cached_property
    def operand(self) -> torch.dtype:
        """Type of the tensor cores' operands and of stored states.

        Never fp16: neither a = 1 / |k|^2 of long keys nor states fit its range.
        """
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    @property
    def narrowest(self) -> int:
        """The narrowest block: 16-bit products below 64 columns leave the path that everything else takes on a GPU."""
        return 16 if self.operand == torch.float32 else 64
