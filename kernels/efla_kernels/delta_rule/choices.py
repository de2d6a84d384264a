"""What a launch of the delta rule's kernels is made of: shapes and options of the problem, block shapes, the split.

No tuning at run time: the choices are a table by width and type, measured once (docs/lab/kernels.md), so that the first
step is quick and runs repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton.language as tl

from efla_kernels.delta_rule import gates
from efla_kernels.launch.arguments import power_of_two
from efla_kernels.launch.choices import Block
from efla_kernels.launch.choices import Problem as BaseProblem
from efla_kernels.launch.chunks import CHUNK

MODES = {
    "delta_rule": gates.RAW.value,
    "deltanet": gates.DELTANET.value,
    "efla": gates.EFLA.value,
    "gated_deltanet": gates.GATED_DELTANET.value,
    "gated_efla": gates.GATED_EFLA.value,
}
RAW = MODES["delta_rule"]
ONE_GRADIENT = (MODES["deltanet"], MODES["efla"], MODES["gated_efla"])  # Gated DeltaNet gains little by it


@dataclass(frozen=True)
class Choice:
    """One row of the table."""

    solve: Block
    scan: Block
    scan_backward: Block
    gradient_q: Block
    gradient_k: Block
    gradient: Block | None  # both in one kernel, over all columns, where there is one (`Problem.one_gradient`)
    transition: Block
    merge: Block


def choose(K: int, V: int, dtype: torch.dtype, decays: bool) -> Choice:
    """Block shapes for key width K, value width V and the inputs' type; measured on an H200 for 16-bit, K = V = 128.

    Triton 3.6 compiles loops of 16 or 32 columns that it does not pipeline to wrong code: no single stage there.
    `gradient_k` in two stages was wrong now and then in an earlier form, where many programs ran. In its form of today
    two stages gave the same bits in 75 runs without a decay and in 50 with one (8x2048, H = 8 and 16; right against
    float64; with a decay before rowsum(dR * V) moved to the scan). They are taken at the widths of those runs and
    nowhere else, and tests/gpu/test_kernels.py repeats such runs.
    """
    if dtype == torch.float32:
        block = Block(32 if K <= 64 else 16, 4, 2)
        gradient = Block(32, 8, 2)
        return Choice(Block(0, 4, 1), block, block, gradient, gradient, None, block, Block(16, 4, 2))
    if K <= 128:
        return Choice(
            solve=Block(0, 4, 1, 168 if decays else 128),
            scan=Block(64, 4, 3),
            scan_backward=Block(64, 4, 3),
            gradient_q=Block(64, 4, 2, 168),
            gradient_k=Block(64, 4, 2 if K == V == 128 else 1),
            gradient=Block(128, 4, 1) if K == V == 128 and dtype == torch.bfloat16 else None,
            transition=Block(64, 4, 3),
            merge=Block(16, 8, 2),
        )
    return Choice(
        solve=Block(0, 8, 1),
        scan=Block(32, 8, 2),
        scan_backward=Block(32, 8, 2),
        gradient_q=Block(32, 8, 2),
        gradient_k=Block(32, 8, 2),
        gradient=None,
        transition=Block(32, 8, 2),
        merge=Block(16, 8, 2),
    )


@cache
def has_wide_products() -> bool:
    """Whether four warps multiply together, from shared memory, as Hopper's do. Elsewhere a kernel with all of V at
    once has no registers for what it multiplies: on an A100 it would spill 2 to 10 KB of every thread, two kernels 32
    bytes. True where there is no GPU (the interpreter); not on AMD's, which number theirs alike."""
    if not torch.cuda.is_available():
        return True
    return torch.version.cuda is not None and torch.cuda.get_device_capability()[0] == 9


@dataclass(frozen=True)
class Problem(BaseProblem):
    """A call of the op; computed once for all calls of the same shapes."""

    key_width: int
    value_width: int
    mode: int
    decays: bool
    scale: float
    segments: int

    @cached_property
    def choice(self) -> Choice:
        """The block shapes of this problem."""
        return choose(self.key_width, self.value_width, self.dtype, self.decays)

    @property
    def one_gradient(self) -> bool:
        """Whether one kernel has q's and k's gradients: `gradient_kernel`, with a decay `gradient_gated_kernel`."""
        return self.choice.gradient is not None and self.mode in ONE_GRADIENT and has_wide_products()

    @property
    def keeps_adjoint(self) -> bool:
        """Whether dR is stored: `gradient_kernel` takes dV = w dR in its place."""
        return self.decays or not self.one_gradient

    @cached_property
    def chunks(self) -> int:
        """Slots for chunk data."""
        return self.chunk_slots(CHUNK)

    @cached_property
    def chunks_per_segment(self) -> int:
        """Of a sequence that is cut into segments; the last segment may have fewer."""
        return -(-self.chunks // (self.batch * self.segments))

    @property
    def columns(self) -> int:
        """Of the gates' table: e, w, r, b where there is a decay, and |k|^2."""
        return 5 if self.decays else 4

    @property
    def bounded(self) -> bool:
        """Whether `decay_pairs` may take exponentials apart: log_decay = g - 1 is -1 or more, and operands are bf16."""
        return self.mode == MODES["gated_efla"] and self.operand == torch.bfloat16

    def state_shape(self, *leading: int) -> tuple[int, ...]:
        """[*leading, H, K, V]."""
        return (*leading, self.heads, self.key_width, self.value_width)

    @cached_property
    def flags(self) -> dict[str, Any]:
        """The constants of every kernel."""
        return {
            "H": self.heads,
            "K": self.key_width,
            "BK": max(self.narrowest, power_of_two(self.key_width)),
            "DECAYS": self.decays,
            "DTYPE": tl.float32 if self.operand == torch.float32 else tl.bfloat16,
            "PRECISION": "tf32x3" if self.operand == torch.float32 else "tf32",
        }

    def width(self, block: Block, inside: bool = False) -> dict[str, int]:
        """V and its block, no wider than V needs. inside: blocks follow each other in a loop within a program.

        16-bit blocks are never below 64 columns where that loop is not pipelined: where rows that no multiple of 8
        measures cannot be copied asynchronously, and where one block holds all of V, so that no loop is left. Such
        products of 16 or 32 columns are what Triton 3.6 compiles to wrong code.
        """
        columns = block.columns
        if self.key_width % 8 or self.value_width % 8 or (inside and self.value_width <= columns):
            columns = max(self.narrowest, columns)
        needed = max(self.narrowest, power_of_two(self.value_width))
        return {"V": self.value_width, "BV": min(columns, needed)}

    @property
    def value_blocks(self) -> int:
        """Blocks of V that the programs of the backward scan divide among them."""
        return -(-self.value_width // self.width(self.choice.scan_backward)["BV"])


def split_segments(
    sequences: int, tokens: int, heads: int, key_width: int, value_width: int, columns: int, processors: int
) -> int:
    """How many segments each row is cut into: 1 where the scans' programs fill the device without it.

    A multiprocessor holds one program of the scan, so the cut that gives each of them one is the best. The first pass
    over the segments costs about as much as the scan itself: below three segments nothing is won. At least 4 chunks
    per segment.
    """
    chunks = -(-tokens // CHUNK)
    programs = sequences * heads * -(-value_width // columns)
    segments = min(processors // programs, chunks // 4)
    if segments < 3 or key_width > 128:  # a wider transition does not fit a program of the merge
        return 1
    per_segment = -(-chunks // segments)
    return -(-chunks // per_segment)
