"""State-space duality's kernels over chunks: which chunk, rows and heads a program has, and how it gets their tiles.

A chunk of L tokens is one block of R rows or two, and pairs of tokens (i reads what j <= i wrote) come in tiles of
R x R: a triangle for each block, and one full tile of the second block's reads from the first. A program goes through
`heads_each` heads of one group; what the group's heads share stays in its registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.tiles import load_rows, store_rows


@triton.jit
def heads_place(heads_each, H: tl.constexpr, G: tl.constexpr, PLACES: tl.constexpr):
    """(chunk, place within it, part of the heads, its first head, its group) of a program; a chunk has PLACES."""
    parts = H // heads_each
    row = tl.program_id(0) // PLACES
    first_head = row % parts * heads_each
    return (row // parts).to(tl.int64), tl.program_id(0) % PLACES, row % parts, first_head, first_head // (H // G)


@triton.jit
def heads(base, left, token, P: tl.constexpr, H: tl.constexpr, R: tl.constexpr, TMA: tl.constexpr):
    """A handle on rows [left, H, P] for `head_tile`: a tensor descriptor, or the base pointer."""
    if TMA:
        return tl.make_tensor_descriptor(base, [left, H * P], [token, 1], [R, P])
    else:
        return base


@triton.jit
def head_tile(
    handle,
    left,
    token,
    head,
    r0,
    h,
    P: tl.constexpr,
    BP: tl.constexpr,
    R: tl.constexpr,
    DTYPE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows r0 to r0 + R - 1 of head h, [R, BP]; zeros from row `left` on."""
    if TMA:
        return handle.load([r0, h * P])
    else:
        base = handle + (tl.full((), 0, tl.int64) + r0) * token + (tl.full((), 0, tl.int64) + h) * head
        return load_rows(base, token, left - r0, P, BP, 0, DTYPE, R)


@triton.jit
def store_head_tile(
    handle,
    left,
    r0,
    h,
    value,
    H: tl.constexpr,
    P: tl.constexpr,
    BP: tl.constexpr,
    R: tl.constexpr,
    DTYPE: tl.constexpr,
    TMA: tl.constexpr,
):
    """The counterpart of `head_tile` for rows [left, H, P] without gaps; with TMA in the operands' type."""
    if TMA:
        handle.store([r0, h * P], value.to(DTYPE))
    else:
        store_rows(handle + r0 * H * P + h * P, H * P, left - r0, P, BP, 0, value, R)


@triton.jit
def chunk_states(
    base, m, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, TMA: tl.constexpr
):
    """A handle on the states [H, N, P] of chunk m for `state_tile`, in tiles of ROWS rows."""
    base += m * H * N * P
    if TMA:
        return tl.make_tensor_descriptor(base, [H * N, P], [P, 1], [ROWS, BP])
    else:
        return base


@triton.jit
def state_tile(
    handle,
    h,
    n0,
    N: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    BP: tl.constexpr,
    DTYPE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows n0 to n0 + ROWS - 1 of head h's state, zeros from row N on."""
    if TMA:
        return handle.load([h * N + n0, 0])
    else:
        return load_rows(handle + (h * N + n0) * P, P, N - n0, P, BP, 0, DTYPE, ROWS)


@triton.jit
def chunk_table(base, m, H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, TMA: tl.constexpr):
    """A handle on the table [H, 2, L] of chunk m for `table_rows`.

    A descriptor here as well: pointers of vectors that every warp needs whole take a copy of each thread's share and
    the registers for its addresses.
    """
    base += m * H * 2 * L
    if TMA:
        return tl.make_tensor_descriptor(base, [H * 2 * L], [1], [R])
    else:
        return base


@triton.jit
def table_rows(handle, h, row: tl.constexpr, r0, L: tl.constexpr, R: tl.constexpr, TMA: tl.constexpr):
    """Tokens r0 to r0 + R - 1 of head h's dt (row 0) or b / ln 2 (row 1)."""
    at = (h * 2 + row) * L + r0
    if TMA:
        return handle.load([at])
    else:
        return tl.load(handle + at + tl.arange(0, R))


@triton.jit
def decays(b_later, b_earlier, TRIANGLE: tl.constexpr, R: tl.constexpr):
    """Gamma of a tile of R x R pairs, transposed: columns are the later tokens.

    TRIANGLE: the tile on a block's diagonal, of which it leaves the diagonal itself out.
    """
    exponent = b_later[None, :] - b_earlier[:, None]
    if TRIANGLE:
        later = tl.arange(0, R)[None, :] > tl.arange(0, R)[:, None]
        exponent = tl.where(later, exponent, float("-inf"))
    return tl.exp2(exponent)
