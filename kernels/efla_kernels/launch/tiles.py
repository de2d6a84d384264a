"""Which tokens a program's chunk has: the same arithmetic for equal rows and for packed segments.

Chunks are numbered through: chunk m of the whole launch has its slot in every buffer of chunk data ([chunks, H,
...]). Equal rows: row b's chunk c is m = b * ceil(T / C) + c. Packed: sequence n's chunks start at first_chunk[n],
and chunk_sequence[m] names the sequence of chunk m (-1 for slots that no chunk uses: their number is an upper bound,
so that the host need not wait for the device to count them). ROWS is the chunk, or the tile: CHUNK unless a kernel
names its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.interpreter import INTERPRETED

CHUNK = tl.constexpr(64)


@triton.jit
def sequence_span(n, T, cu_seqlens, first_chunk, PACKED: tl.constexpr, ROWS: tl.constexpr = CHUNK):
    """(first token, length, first chunk) of sequence n; tokens counted through the whole [B*T] rows."""
    if PACKED:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        last = tl.load(cu_seqlens + n + 1).to(tl.int64)
        return first, (last - first).to(tl.int32), tl.load(first_chunk + n).to(tl.int64)
    else:
        n64 = n.to(tl.int64)
        return n64 * T, T, n64 * tl.cdiv(T, ROWS)


@triton.jit
def scan_place(H: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr):
    """(sequence, segment, head, first column) of a scan's program; neighbours share a head's q and k."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    place = tl.program_id(0)
    row = place // blocks
    return row // (H * SEGMENTS), row // H % SEGMENTS, row % H, place % blocks * BLOCK


@triton.jit
def chunk_span(m, T, cu_seqlens, first_chunk, chunk_sequence, PACKED: tl.constexpr, ROWS: tl.constexpr = CHUNK):
    """(first token of the chunk, tokens left in its sequence from there, whether the slot is used)."""
    if PACKED:
        n = tl.load(chunk_sequence + m)
        used = n >= 0
        safe = tl.maximum(n, 0)
        first, length, chunk0 = sequence_span(safe, T, cu_seqlens, first_chunk, PACKED, ROWS)
        c = m - chunk0
        return first + c * ROWS, length - (c * ROWS).to(tl.int32), used
    else:
        per_row = tl.cdiv(T, ROWS)
        place = m.to(tl.int32)  # a division of 64 bits costs a microsecond
        b = place // per_row
        c = place - b * per_row
        return b.to(tl.int64) * T + c * ROWS, T - c * ROWS, True


@triton.jit
def load_rows(
    base, stride, left,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, column0, dtype: tl.constexpr, ROWS: tl.constexpr = CHUNK,
):  # fmt: skip
    """Rows 0..ROWS-1 (zeros from `left` on) and columns column0..column0+BLOCK-1 (zeros from WIDTH on) at `base`."""
    rows = tl.arange(0, ROWS)
    columns = column0 + tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * stride + columns[None, :]
    mask = rows[:, None] < left
    if WIDTH % BLOCK != 0:
        mask = mask & (columns[None, :] < WIDTH)
    return tl.load(pointers, mask=mask, other=0.0).to(dtype)


@triton.jit
def ask_for_rows(base, stride, left, WIDTH: tl.constexpr, ROWS: tl.constexpr = CHUNK):
    """Have ROWS rows of 16-bit numbers (the first `left` of them, 1 or more) brought into L2, in lines of 128 bytes."""
    if not INTERPRETED:
        rows = tl.minimum(tl.arange(0, ROWS), left - 1)
        lines = tl.arange(0, WIDTH // 64) * 64
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [base + rows[:, None] * stride + lines[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_rows(
    base, stride, left, WIDTH: tl.constexpr, BLOCK: tl.constexpr, column0, value, ROWS: tl.constexpr = CHUNK
):
    """The counterpart of `load_rows`."""
    rows = tl.arange(0, ROWS)
    columns = column0 + tl.arange(0, BLOCK)
    mask = rows[:, None] < left
    if WIDTH % BLOCK != 0:
        mask = mask & (columns[None, :] < WIDTH)
    tl.store(base + rows[:, None] * stride + columns[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def matrix(base, rows, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr = CHUNK):
    """A handle on a matrix of `rows` rows, `stride` elements apart, for `load_tile` and `store_tile`.

    TMA: a tensor descriptor, whose copies are asynchronous, take no registers and stop at the matrix's edge by
    themselves (rows and base must be 16-byte aligned). Otherwise the base pointer, and edges are masked.
    """
    if TMA:
        # a descriptor of no rows is malformed even where it is never used
        return tl.make_tensor_descriptor(base, [tl.maximum(rows, 1), WIDTH], [stride, 1], [ROWS, BLOCK])
    else:
        return base


@triton.jit
def load_tile(
    handle, rows, stride, row0, column0,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr = CHUNK,
):  # fmt: skip
    """Tile [ROWS, BLOCK] of a `matrix` at (row0, column0), zeros outside of it."""
    if TMA:
        return handle.load([row0, column0])
    else:
        base = handle + (tl.full((), 0, tl.int64) + row0) * stride
        return load_rows(base, stride, rows - row0, WIDTH, BLOCK, column0, handle.dtype.element_ty, ROWS)


@triton.jit
def store_tile(handle, rows, stride, row0, column0, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """The counterpart of `load_tile`; `value` comes in the matrix's type."""
    if TMA:
        handle.store([row0, column0], value)
    else:
        store_rows(
            handle + (tl.full((), 0, tl.int64) + row0) * stride, stride, rows - row0, WIDTH, BLOCK, column0, value
        )


@triton.jit
def load_state(base, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, column0):
    """A [BK, BV] block of a state [K, V] stored row by row."""
    rows = tl.arange(0, BK)
    columns = column0 + tl.arange(0, BV)
    pointers = base + rows[:, None] * V + columns[None, :]
    if K % BK == 0 and V % BV == 0:
        return tl.load(pointers)
    return tl.load(pointers, mask=(rows[:, None] < K) & (columns[None, :] < V), other=0.0)


@triton.jit
def store_state(base, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, column0, value):
    """The counterpart of `load_state`."""
    rows = tl.arange(0, BK)
    columns = column0 + tl.arange(0, BV)
    pointers = base + rows[:, None] * V + columns[None, :]
    value = value.to(base.dtype.element_ty)
    if K % BK == 0 and V % BV == 0:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, mask=(rows[:, None] < K) & (columns[None, :] < V))
