"""State-space duality: shapes and options of a problem, block shapes, the split of long sequences and of heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl

from efla_kernels.launch import choices as launch_choices
from efla_kernels.launch.arguments import power_of_two


class Block(NamedTuple):
    """Rows of the tile (of the state in the scan, of the chunk elsewhere), warps, stages of the software pipeline."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Choice:
    """One row of the table. chunk: tokens per chunk, a multiple of every block of its rows."""

    chunk: int
    scan: Block
    output: Block
    gradient_x: Block
    gradient_bc: Block


def choose(N: int, P: int, dtype: torch.dtype) -> Choice:
    """Block shapes for state width N, head width P and the inputs' type.

    No loop has a single stage: at small tiles Triton 3.6 compiles those to wrong code. fp32 is multiplied in full, not
    as three products of tf32 halves, which need more registers than there are.
    """
    if dtype == torch.float32:
        block = Block(32, 8, 2)
        return Choice(32, Block(32, 4, 2), block, block, block)
    if N <= 128 and P <= 64:
        return Choice(128, Block(128, 4, 2), Block(64, 4, 2), Block(64, 4, 2), Block(64, 4, 3))
    return Choice(64, Block(64, 4, 2), Block(64, 4, 2), Block(64, 4, 2), Block(64, 8, 2))


@dataclass(frozen=True)
class Problem(launch_choices.Problem):
    """Shapes and options that all launches of one call share, and what follows from them, computed once."""

    groups: int
    state_width: int
    width: int
    processors: int

    @cached_property
    def choice(self) -> Choice:
        """The block shapes of this problem."""
        return choose(self.state_width, self.width, self.dtype)

    @cached_property
    def chunks(self) -> int:
        """Slots for chunk data."""
        return self.chunk_slots(self.choice.chunk)

    def state_shape(self, *leading: int) -> tuple[int, ...]:
        """[*leading, H, N, P]."""
        return (*leading, self.heads, self.state_width, self.width)

    def heads_each(self, places: int, least: int = 4) -> int:
        """Heads of a group that one program goes through: as many as leave about `least` programs per multiprocessor.

        places: programs per chunk and head otherwise. Rounded up, so that programs that would just overflow what runs
        at once are fewer instead.
        """
        per_group = self.heads // self.groups
        most = -(-self.chunks * places * self.heads // (least * self.processors))
        return max(d for d in range(1, per_group + 1) if per_group % d == 0 and d <= most)

    @cached_property
    def state_block(self) -> int:
        """Rows of a tile that holds the whole state."""
        return max(16, power_of_two(self.state_width))

    def scan_rows(self, descriptors: bool) -> int:
        """Rows of the state in a program of the scans; pointers in the place of descriptors take registers as well."""
        rows = self.choice.scan.rows if descriptors else min(self.choice.scan.rows, 64)
        return min(rows, self.state_block)

    def output_block(self, descriptors: bool) -> Block:
        """The output's block; pointers take the registers that a chunk's second block of rows needs."""
        block = self.choice.output
        return block if descriptors or block.rows == self.choice.chunk else Block(self.choice.chunk, 8, 2)

    def segments(self) -> tuple[int, int]:
        """(segments of a sequence, chunks in each): 1 where the scan's programs fill the device without a cut.

        The first pass over the segments costs as much as the scan itself, so that below three nothing is won.
        """
        chunks = -(-self.tokens // self.choice.chunk)
        if self.packed:
            return 1, chunks
        programs = self.sequences * self.heads * -(-self.state_width // self.choice.scan.rows)
        segments = min(2 * self.processors // programs, chunks // 4)
        if segments < 3:
            return 1, chunks
        each = -(-chunks // segments)
        return -(-chunks // each), each

    @cached_property
    def flags(self) -> dict[str, Any]:
        """The constants of every kernel that multiplies."""
        return {
            "H": self.heads,
            "G": self.groups,
            "N": self.state_width,
            "P": self.width,
            "BP": max(16, power_of_two(self.width)),
            "L": self.choice.chunk,
            "PACKED": self.packed,
            "DTYPE": tl.float32 if self.operand == torch.float32 else tl.bfloat16,
            "PRECISION": "ieee" if self.operand == torch.float32 else "tf32",
        }

    def tile(self, block: Block) -> dict[str, Any]:
        """The constants of a kernel over chunks: its rows, the whole width of the state, its pipeline."""
        return {"R": block.rows, "BN": self.state_block, "STAGES": block.stages, "num_warps": block.warps}

    @property
    def gate_heads(self) -> int:
        """Heads side by side in a program of the gates' kernels."""
        return min(32, power_of_two(self.heads))
