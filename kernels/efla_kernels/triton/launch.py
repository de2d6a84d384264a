"""Launches of the delta rule's kernels: buffers, block shapes, the split of long sequences.

No tuning at run time: the choices are a table by width and type, measured once (kernels/README.md), so that the first
step is quick and runs repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.triton import gates
from efla_kernels.triton.gradient_k import gradient_k_kernel
from efla_kernels.triton.gradient_q import gradient_q_kernel
from efla_kernels.triton.scan import scan_kernel
from efla_kernels.triton.scan_backward import scan_backward_kernel
from efla_kernels.triton.solve import solve_kernel
from efla_kernels.triton.split import merge_kernel, transition_kernel

CHUNK = 64
MODES = {
    "delta_rule": gates.RAW.value,
    "deltanet": gates.DELTANET.value,
    "efla": gates.EFLA.value,
    "gated_deltanet": gates.GATED_DELTANET.value,
    "gated_efla": gates.GATED_EFLA.value,
}
RAW = MODES["delta_rule"]


class Block(NamedTuple):
    """Columns of v per program, warps, stages of the software pipeline."""

    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Choice:
    """One row of the table."""

    solve: Block
    scan: Block
    scan_backward: Block
    gradient_q: Block
    gradient_k: Block
    transition: Block
    merge: Block


def choose(K: int, V: int, dtype: torch.dtype) -> Choice:
    """Block shapes for key width K, value width V and the inputs' type; measured on an H200 for 16-bit, K = V = 128."""
    if dtype == torch.float32:
        columns = 32 if K <= 64 else 16
        block = Block(columns, 4, 1)
        return Choice(block, block, block, Block(32, 8, 1), Block(32, 8, 1), block, Block(16, 4, 1))
    if K <= 128:
        return Choice(
            solve=Block(0, 4, 1),
            scan=Block(64, 4, 3),
            scan_backward=Block(64, 4, 3),
            gradient_q=Block(64, 4, 1),
            gradient_k=Block(64, 4, 1),
            transition=Block(64, 4, 3),
            merge=Block(16, 8, 2),
        )
    return Choice(
        solve=Block(0, 8, 1),
        scan=Block(32, 8, 2),
        scan_backward=Block(32, 8, 2),
        gradient_q=Block(32, 8, 1),
        gradient_k=Block(32, 8, 1),
        transition=Block(32, 8, 2),
        merge=Block(16, 8, 1),
    )


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass; empty tensors where it was not kept."""

    inverse: Tensor  # T [chunks, H, C, C]
    scores: Tensor  # P [chunks, H, C, C]
    table: Tensor  # e, w, r (and b) [chunks, H, 3 or 4, C] fp32
    states: Tensor  # S before each chunk [chunks, H, K, V]
    solved: Tensor  # X [chunks, H, C, V]
    transitions: Tensor  # M [N, segments, H, K, K] fp32 where sequences were split


@dataclass(frozen=True)
class Problem:
    """Shapes and options that all launches of one call share."""

    batch: int
    tokens: int
    heads: int
    key_width: int
    value_width: int
    sequences: int
    dtype: torch.dtype
    mode: int
    decays: bool
    packed: bool
    scale: float
    segments: int

    @property
    def chunks(self) -> int:
        """Slots for chunk data: exact for equal rows, an upper bound for packed segments."""
        if self.packed:
            return self.tokens // CHUNK + self.sequences
        return self.batch * -(-self.tokens // CHUNK)

    @property
    def chunks_per_segment(self) -> int:
        return -(-self.chunks // (self.batch * self.segments))

    @property
    def operand(self) -> torch.dtype:
        """Type of the tensor cores' operands. Never fp16: its range does not hold a = 1 / |k|^2 of long keys."""
        return torch.float32 if self.dtype == torch.float32 else torch.bfloat16

    @property
    def columns(self) -> int:
        return 4 if self.decays else 3

    def state_shape(self, *leading: int) -> tuple[int, ...]:
        return (*leading, self.heads, self.key_width, self.value_width)

    def flags(self) -> dict[str, Any]:
        """The constants of every kernel."""
        return {
            "H": self.heads,
            "K": self.key_width,
            "BK": max(16, triton.next_power_of_2(self.key_width)),
            "DECAYS": self.decays,
            "DTYPE": tl.float32 if self.operand == torch.float32 else tl.bfloat16,
            "PRECISION": "ieee" if self.operand == torch.float32 else "tf32",
        }

    def width(self, block: Block) -> dict[str, int]:
        """V and its block, no wider than V needs."""
        return {"V": self.value_width, "BV": max(16, min(block.columns, triton.next_power_of_2(self.value_width)))}


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


class Packing(NamedTuple):
    """Offsets of packed segments for the kernels; the inputs stand in where rows are equal (never read)."""

    cu_seqlens: Tensor
    first_chunk: Tensor
    chunk_sequence: Tensor


def pack(problem: Problem, cu_seqlens: Tensor | None, stand_in: Tensor) -> Packing:
    """Chunk numbers of packed segments, computed on the device so that the host never waits."""
    if cu_seqlens is None:
        return Packing(stand_in, stand_in, stand_in)
    counts = (cu_seqlens.diff() + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    slots = torch.arange(problem.chunks, device=cu_seqlens.device)
    owner = torch.searchsorted(ends, slots, right=True)
    owner = torch.where(owner < problem.sequences, owner, -1)
    return Packing(cu_seqlens.to(torch.int32), (ends - counts).to(torch.int32), owner.to(torch.int32))


def _rows(x: Tensor) -> Tensor:
    """x [B, T, H, D] with unit last stride and rows of one batch right behind those of the one before."""
    B, T = x.shape[:2]
    fine = x.stride(3) == 1 and (B == 1 or x.stride(0) == T * x.stride(1))
    return x if fine else x.contiguous()


def _tma(p: Problem, *tensors: Tensor) -> bool:
    """Whether tensor descriptors can serve: 16-bit rows of 16-byte multiples, K a power of two (states in whole tiles).

    Descriptors are made in the kernels, from memory that Triton asks for here; its allocator belongs to a thread, and
    autograd's backward has one of its own.
    """
    if p.dtype == torch.float32 or p.key_width < 16 or p.key_width & (p.key_width - 1) or not tensors[0].is_cuda:
        return False
    for x in tensors:
        if x.data_ptr() % 16 or x.shape[3] % 8 or x.stride(1) % 8 or x.stride(2) % 8:
            return False
    device = tensors[0].device
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device=device, dtype=torch.int8))
    return True


def forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Saved]:
    """Outputs, final states (empty without `output_final`) and, with `keep`, what the backward pass needs."""
    p, choice = problem, choose(problem.key_width, problem.value_width, problem.dtype)
    q, k, v, gate = _rows(q), _rows(k), _rows(v), gate.contiguous()
    unused = gate
    packing = pack(p, cu_seqlens, unused)
    fp32: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    operand: dict[str, Any] = {"device": q.device, "dtype": p.operand}
    inverse = torch.empty(p.chunks, p.heads, CHUNK, CHUNK, **operand)
    scores = torch.empty_like(inverse)
    table = torch.empty(p.chunks, p.heads, p.columns, CHUNK, **fp32)
    solve_kernel[(p.chunks * p.heads,)](
        q, k, gate, unused if write is None else write.contiguous(), unused if decay is None else decay.contiguous(),
        *packing, inverse, scores, table, p.tokens, p.scale, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        MODE=p.mode, PACKED=p.packed, num_warps=choice.solve.warps, num_stages=choice.solve.stages, **p.flags(),
    )  # fmt: skip
    transitions = torch.empty(0, **fp32)
    if p.segments > 1:
        initial, transitions = _first_states(p, choice, k, v, inverse, table, packing, initial)
    nothing = torch.empty(0, **fp32)
    # packed rows that no segment covers stay zero
    o = (torch.zeros if p.packed else torch.empty)(v.shape, device=v.device, dtype=v.dtype)
    final = torch.empty(p.state_shape(p.sequences), **fp32) if output_final else nothing
    states = torch.empty(p.state_shape(p.chunks), **operand) if keep else torch.empty(0, **operand)
    solved = torch.empty(p.chunks, p.heads, CHUNK, p.value_width, **operand) if keep else torch.empty(0, **operand)
    width, block = p.width(choice.scan), choice.scan
    grid = (p.sequences * p.segments * p.heads * -(-p.value_width // width["BV"]),)
    scan_kernel[grid](
        q, k, v, inverse, scores, table, unused if initial is None else initial, packing.cu_seqlens,
        packing.first_chunk, o, final, states, solved, p.tokens, p.chunks_per_segment,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        SEGMENTS=p.segments, INITIAL=initial is not None, FINAL=output_final, SAVE=keep, TMA=_tma(p, q, k, v),
        PACKED=p.packed, STAGES=block.stages, num_warps=block.warps, **width, **p.flags(),
    )  # fmt: skip
    return o, final, Saved(inverse, scores, table, states, solved, transitions)


def _first_states(
    p: Problem,
    choice: Choice,
    k: Tensor,
    v: Tensor,
    inverse: Tensor,
    table: Tensor,
    packing: Packing,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The first state of every segment [N, segments, H, K, V] and the segments' transitions."""
    fp32: dict[str, Any] = {"device": k.device, "dtype": torch.float32}
    lead = (p.sequences, p.segments)
    transitions = torch.empty(*lead, p.heads, p.key_width, p.key_width, **fp32)
    built = torch.empty(p.state_shape(*lead), **fp32)
    width, block = p.width(choice.transition), choice.transition
    blocks = -(-p.value_width // width["BV"]) + -(-p.key_width // width["BV"])
    transition_kernel[(p.sequences * p.segments * p.heads * blocks,)](
        k, v, inverse, table, packing.cu_seqlens, packing.first_chunk, transitions, built, p.tokens,
        p.chunks_per_segment, k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        SEGMENTS=p.segments, TMA=_tma(p, k, v), STAGES=block.stages, num_warps=block.warps, **width, **p.flags(),
    )  # fmt: skip
    return _merge(p, choice, transitions, built, initial, reverse=False, left_over=None), transitions


def _merge(
    p: Problem,
    choice: Choice,
    transitions: Tensor,
    local: Tensor,
    outer: Tensor | None,
    reverse: bool,
    left_over: Tensor | None,
) -> Tensor:
    carried = torch.empty_like(local)
    width, block = p.width(choice.merge), choice.merge
    flags = p.flags()
    merge_kernel[(p.sequences * p.heads * -(-p.value_width // width["BV"]),)](
        transitions, local, local if outer is None else outer, carried, local if left_over is None else left_over,
        SEGMENTS=p.segments, REVERSE=reverse, OUTER=outer is not None, LEFT_OVER=left_over is not None,
        H=p.heads, K=p.key_width, BK=flags["BK"], PRECISION=flags["PRECISION"], STAGES=block.stages,
        num_warps=block.warps, **width,
    )  # fmt: skip
    return carried


class Gradients(NamedTuple):
    """Gradients of the op's inputs; empty tensors where there is no such input."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    write: Tensor
    decay: Tensor
    initial: Tensor


def backward(
    problem: Problem,
    saved: Saved,
    do: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor | None,
    decay: Tensor | None,
    cu_seqlens: Tensor | None,
    need_initial: bool,
) -> Gradients:
    """Gradients of all inputs from do [B, T, H, V] and the final states' gradient."""
    p, choice = problem, choose(problem.key_width, problem.value_width, problem.dtype)
    q, k, v, gate, do = _rows(q), _rows(k), _rows(v), gate.contiguous(), do.contiguous()
    unused = gate
    packing = pack(p, cu_seqlens, unused)
    fp32: dict[str, Any] = {"device": q.device, "dtype": torch.float32}
    operand: dict[str, Any] = {"device": q.device, "dtype": p.operand}
    make = torch.zeros if p.packed else torch.empty
    dv = make(v.shape, device=v.device, dtype=v.dtype)
    d_initial = torch.empty(p.state_shape(p.sequences) if need_initial else (0,), **fp32)
    d_states = torch.empty(p.state_shape(p.chunks), **operand)
    d_solved = torch.empty(p.chunks, p.heads, CHUNK, p.value_width, **operand)
    width, block = p.width(choice.scan_backward), choice.scan_backward
    grid = (p.sequences * p.segments * p.heads * -(-p.value_width // width["BV"]),)

    tma = _tma(p, q, k, do)

    def scan(d_end: Tensor | None, d_start: Tensor | None, store: bool) -> None:
        scan_backward_kernel[grid](
            q, k, do, saved.inverse, saved.scores, saved.table, unused if d_end is None else d_end,
            packing.cu_seqlens, packing.first_chunk, dv, unused if d_start is None else d_start, d_states, d_solved,
            p.tokens, p.chunks_per_segment, q.stride(1), q.stride(2), k.stride(1), k.stride(2),
            SEGMENTS=p.segments, D_FINAL=d_end is not None, D_INITIAL=d_start is not None,
            STORE=store, PACKED=p.packed, TMA=tma, STAGES=block.stages, num_warps=block.warps, **width, **p.flags(),
        )  # fmt: skip

    if p.segments > 1:
        local = torch.empty(p.state_shape(p.sequences, p.segments), **fp32)
        scan(None, local, False)
        left_over = d_initial if need_initial else None
        d_ends = _merge(p, choice, saved.transitions, local, d_final, reverse=True, left_over=left_over)
        scan(d_ends, None, True)
    else:
        scan(d_final, d_initial if need_initial else None, True)

    dq = make(q.shape, device=q.device, dtype=q.dtype)
    dk = make(k.shape, device=k.device, dtype=k.dtype)
    d_gate = make(gate.shape, **fp32)
    d_write = make(gate.shape if p.mode == RAW else (0,), **fp32)
    d_decay_read = make(gate.shape if p.decays else (0,), **fp32)
    d_decay = make(gate.shape if p.decays else (0,), **fp32)
    decay = unused if decay is None else decay.contiguous()
    width, block = p.width(choice.gradient_q), choice.gradient_q
    gradient_q_kernel[(p.heads * p.chunks,)](
        q, k, decay, do, saved.table, saved.states, saved.solved, *packing, dq, d_decay_read, p.tokens, p.scale,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2),
        MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages, **width, **p.flags(),
    )  # fmt: skip
    width, block = p.width(choice.gradient_k), choice.gradient_k
    gradient_k_kernel[(p.heads * p.chunks,)](
        q, k, v, gate, decay, do, saved.scores, saved.table, saved.states, saved.solved, d_states, d_solved, *packing,
        dk, d_gate, d_write, d_decay, p.tokens,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        MODE=p.mode, PACKED=p.packed, num_warps=block.warps, num_stages=block.stages, **width, **p.flags(),
    )  # fmt: skip
    return Gradients(dq, dk, dv, d_gate, d_write, d_decay_read + d_decay, d_initial)
