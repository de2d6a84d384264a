"""The RMS norms of `norm_linear` and `unit_norm` on Triton: each kernel reads and writes its tensors once.

`norm_torch` has the same four functions in PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.launch.arguments import power_of_two
from efla_kernels.launch.dispatch import launch
from efla_kernels.layers.norm_torch import Kept, OutputGradients

TILE, MOST_COLUMNS = 4096, 1024  # numbers and columns of a tile of `norm_kernel`
TILE_WITH_GATES = (64, 128)  # its rows and columns there: Hopper's wide matmul instructions take 64 rows
LEAST_GATES = 16  # columns of its matmul at least
PER_WARP = 1024  # numbers of each tensor that a warp holds in the other kernels


@triton.jit(do_not_specialize=["N"])
def norm_kernel(
    h,  # [N, D]
    narrow,  # [G, D]
    r,  # [N] fp32
    logits,  # [N, G]
    N,
    eps,
    D: tl.constexpr,
    G: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """r = 1 / sqrt(mean(h^2) + eps), logits = r * (h narrow^T), a block of columns at a time."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < N
    place = rows.to(tl.int64)[:, None] * D
    gates = tl.arange(0, GATES)
    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    sums = tl.zeros([ROWS, GATES], tl.float32)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        hidden = tl.load(h + place + columns[None, :], mask=inside[:, None] & (columns < D)[None, :], other=0.0)
        wide = hidden.to(tl.float32)
        squares += wide * wide
        if G:
            there = (columns < D)[:, None] & (gates < G)[None, :]
            weights = tl.load(narrow + gates[None, :] * D + columns[:, None], mask=there, other=0.0)
            sums = tl.dot(hidden, weights, sums, input_precision="ieee")
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / D + eps)
    tl.store(r + rows, scale, mask=inside)
    if G:
        mask = inside[:, None] & (gates < G)[None, :]
        at = logits + rows.to(tl.int64)[:, None] * G + gates[None, :]
        tl.store(at, (sums * scale[:, None]).to(logits.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def norm_gradient_kernel(
    g,  # [N, D] gradient of h through the wide linears; dh takes its place
    d_link,  # [N, D] gradient of h from its other reader; read if RESIDUAL
    h,  # [N, D]
    r,  # [N] fp32
    logits,  # [N, G]
    d_logits,  # [N, G]
    narrow,  # [G, D]
    scaled,  # out [N, G]: r * d_logits
    N,
    D: tl.constexpr,
    G: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """dh = d_link + g' - h r^2 <g', h> / D,  g' = g + r d_logits narrow.

    d_link = 0 without RESIDUAL. <r d_logits narrow, h> = <d_logits, logits>.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = rows < N
    mask = inside[:, None] & (columns < D)[None, :]
    place = rows.to(tl.int64)[:, None] * D + columns[None, :]
    dx = tl.load(g + place, mask=mask, other=0.0).to(tl.float32)
    hidden = tl.load(h + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(r + rows, mask=inside, other=0.0)
    inner = tl.sum(dx * hidden, 1)
    if G:
        gates = tl.arange(0, GATES)
        there = inside[:, None] & (gates < G)[None, :]
        at = rows.to(tl.int64)[:, None] * G + gates[None, :]
        slope = tl.load(d_logits + at, mask=there, other=0.0).to(tl.float32)
        inner += tl.sum(slope * tl.load(logits + at, mask=there, other=0.0).to(tl.float32), 1)
        tl.store(scaled + at, (slope * scale[:, None]).to(scaled.dtype.element_ty), mask=there)
        more = tl.zeros([ROWS, BLOCK], tl.float32)
        for gate in tl.static_range(G):  # for so few, tl.dot would cost more in layout conversions
            one = tl.load(d_logits + rows.to(tl.int64) * G + gate, mask=inside, other=0.0).to(tl.float32)
            weights = tl.load(narrow + gate * D + columns, mask=columns < D, other=0.0).to(tl.float32)
            more += one[:, None] * weights[None, :]
        dx += more * scale[:, None]
    dx -= hidden * (inner * scale * scale / D)[:, None]
    if RESIDUAL:
        dx += tl.load(d_link + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(g + place, dx.to(g.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def unit_kernel(x, y, r, N, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """r = 1 / sqrt(mean(x^2) + eps), y = x r; x, y [N, D], r [N] fp32."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    place = rows.to(tl.int64)[:, None] * D + columns[None, :]
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / D + eps)
    tl.store(y + place, (wide * scale[:, None]).to(y.dtype.element_ty), mask=mask)
    tl.store(r + rows, scale, mask=rows < N)


@triton.jit(do_not_specialize=["N"])
def unit_gradient_kernel(dy, y, r, dx, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dx = r (dy - y <dy, y> / D)."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < N)[:, None] & (columns < D)[None, :]
    place = rows.to(tl.int64)[:, None] * D + columns[None, :]
    slope = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
    wide = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(r + rows, mask=rows < N, other=0.0)
    slope -= wide * (tl.sum(slope * wide, 1) / D)[:, None]
    tl.store(dx + place, (slope * scale[:, None]).to(dx.dtype.element_ty), mask=mask)


def _whole_rows(N: int, D: int) -> tuple[int, dict[str, int]]:
    """Programs and options of a kernel that holds whole rows: 32 numbers of each tensor in a thread.

    A row that fits has one warp, so that it waits for no other warp. Wider rows share a program in pairs, which read
    the gates' weights once.
    """
    block = power_of_two(D)
    rows = PER_WARP // block if block <= PER_WARP else 2
    return -(-N // rows), {"D": D, "ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // PER_WARP))}


def norm_factors(h: Tensor, narrow: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(r, logits) of h [N, D] and narrow [G, D]; logits are empty without narrow."""
    (N, D), G = h.shape, 0 if narrow is None else narrow.shape[0]
    h = h.contiguous()
    r, logits = h.new_empty(N, dtype=torch.float32), h.new_empty((N, G) if G else 0)
    columns = min(TILE_WITH_GATES[1] if G else MOST_COLUMNS, power_of_two(max(D, 16)))
    rows = TILE_WITH_GATES[0] if G else TILE // columns
    launch(
        norm_kernel, -(-N // rows), h, h if narrow is None else narrow.contiguous(), r, logits, N, eps, D=D, G=G,
        GATES=max(LEAST_GATES, power_of_two(max(G, 1))), ROWS=rows, BLOCK=columns, num_warps=4,
    )  # fmt: skip
    return r, logits


def norm_gradient(g: Tensor, d: OutputGradients, kept: Kept) -> tuple[Tensor, Tensor | None]:
    """(dh, r * d_logits) for g = sum_i d_raw_i W_i [N, D], whose memory dh takes; None without d_logits."""
    (N, D), h, logits = kept.h.shape, kept.h.contiguous(), kept.logits
    G, narrow, d_logits, scaled = 0, g, logits, None  # placeholders without gates
    if kept.narrow is not None and d.logits is not None:
        G, narrow, d_logits, scaled = kept.narrow.shape[0], kept.narrow.contiguous(), d.logits, torch.empty_like(logits)
    programs, options = _whole_rows(N, D)
    launch(
        norm_gradient_kernel, programs, g, g if d.link is None else d.link, h, kept.r, logits, d_logits, narrow,
        logits if scaled is None else scaled, N, G=G, GATES=power_of_two(max(G, 1)), RESIDUAL=d.link is not None,
        **options,
    )  # fmt: skip
    return g, scaled


def unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r) of x [N, D]."""
    x = x.contiguous()
    y, r = torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    programs, options = _whole_rows(*x.shape)
    launch(unit_kernel, programs, x, y, r, x.shape[0], eps, **options)
    return y, r


def unit_gradient(dy: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """dx of dy, y [N, D] and r [N]."""
    dx = torch.empty_like(y)
    programs, options = _whole_rows(*y.shape)
    launch(unit_gradient_kernel, programs, dy, y, r, dx, y.shape[0], **options)
    return dx
