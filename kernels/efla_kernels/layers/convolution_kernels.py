"""Short causal depthwise convolution and SiLU, forward and backward, for several outputs in one launch.

    z_t = bias + sum_j w_j u_{t-j}  (j < W, w_0 for the current token; u_t = r_t x_t),   y_t = z_t sigmoid(z_t)
    dz_t = dy_t s (1 + z (1 - s)),  s = sigmoid(z_t);   dx_t = r_t sum_j w_j dz_{t+j};   dw_j = sum_t dz_t u_{t-j}

r_t are the row scales, 1 by default.

A program walks through STRIP tokens of BLOCK channels. The last three inputs stay in registers, in the backward pass
with the three gradients that are not complete yet. So every tensor moves once, the backward pass computes z once, and
the sums of dw and dbias need no exchange between threads. Each program writes its sums into a row of a table, which
PyTorch adds up: no atomics, the same bits in every run.

The forward pass has ROWS strips side by side and loads four tokens ahead into registers. The backward pass has one
strip, so that what depends on the token alone is a scalar, and loads STAGES - 1 times four tokens ahead into shared
memory (Triton pipelines the loop of `tl.range` so, for loads of four bytes or more). WHOLE: T is a multiple of STRIP.
All strips are full then, and no load needs a mask for them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from efla_kernels.launch.interpreter import INTERPRETED


@triton.jit
def sigmoid(z):
    """1 / (1 + exp(-z)) in fp32 within about 2e-7, in four instructions.

    Triton's exponential and division guard denormals and huge divisors with six more instructions. The backward pass is
    bound by its instructions. Where exp(-z) overflows, the result is still 0.
    """
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-z))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [z * -1.4426950408889634],  # log2(e)
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def widened(x):
    """x in fp32. Two bf16 take two instructions together; Triton's conversion takes three."""
    if INTERPRETED or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )


@triton.jit
def part_of(block, y0, y1, y2, D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, BLOCK: tl.constexpr):
    """(tensor, width, first channel, first column) of a channel block; each block belongs to one part."""
    end0: tl.constexpr = (D0 + BLOCK - 1) // BLOCK
    end1: tl.constexpr = end0 + (D1 + BLOCK - 1) // BLOCK
    in0 = block < end0
    in1 = block < end1
    pointer = tl.where(in0, y0, tl.where(in1, y1, y2))
    width = tl.where(in0, D0, tl.where(in1, D1, D2))
    before = tl.where(in0, 0, tl.where(in1, D0, D0 + D1))
    column = (block - tl.where(in0, 0, tl.where(in1, end0, end1))) * BLOCK
    return pointer, width, before, column


@triton.jit
def weight_at(weight, channels, inside, J: tl.constexpr, W: tl.constexpr):
    """w_J in fp32; zeros from the kernel size on."""
    if J < W:
        return tl.load(weight + channels * W + (W - 1 - J), mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros(channels.shape, tl.float32)


@triton.jit
def factor_at(scale, place, t, T, there, J: tl.constexpr, SCALED: tl.constexpr):
    """The row scale of token t + J; zero where there is no such token. there: whether the strip exists."""
    if SCALED:
        return tl.load(scale + (place + J), mask=there & (t + J >= 0) & (t + J < T), other=0.0)
    else:
        return place  # never read


@triton.jit
def times(x, factor, SCALED: tl.constexpr):
    """x in fp32, times its row scale."""
    if SCALED:
        return x.to(tl.float32) * factor
    else:
        return x.to(tl.float32)


@triton.jit
def before_strip(x, scale, state, b, t, T, stride, channels, there, inside, D: tl.constexpr,
                 W: tl.constexpr, STATE: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """The input at token t < T of row b, in fp32: from `state` where t < 0, zeros where there is none."""
    value = tl.load(x + (b * T + t) * stride + channels, mask=inside & (t >= 0) & (t < T), other=0.0)
    value = times(value, factor_at(scale, b * T + t, t, T, there, 0, SCALED), SCALED)
    if STATE:
        held = inside & (t < 0) & (t >= 1 - W)
        value += tl.load(state + (b * (W - 1) + (t + W - 1)) * D + channels, mask=held, other=0.0).to(tl.float32)
    return value


@triton.jit
def row_at(base, place, t, T, end, stride, columns, inside, J: tl.constexpr):
    """Token t + J at `columns`, as stored; zeros from `end` or T on. place: the index of token t in all rows.

    With a constant stride, addresses differ from call to call by a constant.
    """
    inside = inside & (t + J < end) & (t + J < T)
    return tl.load(base + ((place + J) * stride + columns), mask=inside, other=0.0)


@triton.jit
def same_document(starts, t, T):
    """Whether tokens t-1, t-2, t-3 of packed rows belong to t's document."""
    start = tl.load(starts + t, mask=t < T, other=0)
    return t - 1 >= start, t - 2 >= start, t - 3 >= start


@triton.jit
def activate(base, place, t, T, end, width, columns, inside, starts, x, h1, h2, h3, w0, w1, w2, w3, bias,
             J: tl.constexpr, PACKED: tl.constexpr):  # fmt: skip
    """Store y of token t + J, whose input is x and whose earlier ones are h1, h2, h3."""
    if PACKED:
        m1, m2, m3 = same_document(starts, t + J, T)
        h1, h2, h3 = tl.where(m1, h1, 0.0), tl.where(m2, h2, 0.0), tl.where(m3, h3, 0.0)
    z = bias + w0 * x + w1 * h1 + w2 * h2 + w3 * h3
    y = z * sigmoid(z)
    keep = inside & (t + J < end) & (t + J < T)
    tl.store(base + ((place + J) * width + columns), y.to(base.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["T", "strips"])
def convolution_kernel(
    x,  # [B, T, D], rows `stride` apart, batches right behind each other
    weight,  # [D, W]
    bias,  # [D]; BIAS only
    state,  # [B, W-1, D]; STATE only
    starts,  # [T] first token of each token's document; PACKED only
    scale,  # [B, T] fp32, row scales; SCALED only
    y0,  # out [B, T, D0], and the two other parts
    y1,
    y2,
    T,
    strips,  # of all rows
    stride: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    W: tl.constexpr,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    STATE: tl.constexpr,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
):
    D: tl.constexpr = D0 + D1 + D2
    y, width, before, column = part_of(tl.program_id(0) % BLOCKS, y0, y1, y2, D0, D1, D2, BLOCK)
    index = tl.program_id(0) // BLOCKS * ROWS + tl.arange(0, ROWS)[:, None]
    per_row = tl.cdiv(T, STRIP)
    row = (index // per_row).to(tl.int64)
    t = index % per_row * STRIP
    end = tl.where(index < strips, t + STRIP, 0)
    columns = column + tl.arange(0, BLOCK)[None, :] + tl.zeros([ROWS, 1], tl.int32)
    there = index < strips
    inside = there
    if not EVEN:
        inside = inside & (columns < width)
    channels = before + columns
    w0 = weight_at(weight, channels, inside, 0, W)
    w1 = weight_at(weight, channels, inside, 1, W)
    w2 = weight_at(weight, channels, inside, 2, W)
    w3 = weight_at(weight, channels, inside, 3, W)
    shift = tl.zeros([ROWS, BLOCK], tl.float32)
    if BIAS:
        shift = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    h3 = before_strip(x, scale, state, row, t - 3, T, stride, channels, there, inside, D, W, STATE, SCALED)
    h2 = before_strip(x, scale, state, row, t - 2, T, stride, channels, there, inside, D, W, STATE, SCALED)
    h1 = before_strip(x, scale, state, row, t - 1, T, stride, channels, there, inside, D, W, STATE, SCALED)
    place = row * T + t
    n0 = row_at(x, place, t, T, end, stride, channels, inside, 0)
    n1 = row_at(x, place, t, T, end, stride, channels, inside, 1)
    n2 = row_at(x, place, t, T, end, stride, channels, inside, 2)
    n3 = row_at(x, place, t, T, end, stride, channels, inside, 3)
    f0, f1 = factor_at(scale, place, t, T, there, 0, SCALED), factor_at(scale, place, t, T, there, 1, SCALED)
    f2, f3 = factor_at(scale, place, t, T, there, 2, SCALED), factor_at(scale, place, t, T, there, 3, SCALED)
    for _ in range(STRIP // 4):
        x0, x1, x2, x3 = times(n0, f0, SCALED), times(n1, f1, SCALED), times(n2, f2, SCALED), times(n3, f3, SCALED)
        n0 = row_at(x, place, t, T, end, stride, channels, inside, 4)  # in flight while these four are computed
        n1 = row_at(x, place, t, T, end, stride, channels, inside, 5)
        n2 = row_at(x, place, t, T, end, stride, channels, inside, 6)
        n3 = row_at(x, place, t, T, end, stride, channels, inside, 7)
        f0, f1 = factor_at(scale, place, t, T, there, 4, SCALED), factor_at(scale, place, t, T, there, 5, SCALED)
        f2, f3 = factor_at(scale, place, t, T, there, 6, SCALED), factor_at(scale, place, t, T, there, 7, SCALED)
        activate(y, place, t, T, end, width, columns, inside, starts, x0, h1, h2, h3, w0, w1, w2, w3, shift, 0, PACKED)
        activate(y, place, t, T, end, width, columns, inside, starts, x1, x0, h1, h2, w0, w1, w2, w3, shift, 1, PACKED)
        activate(y, place, t, T, end, width, columns, inside, starts, x2, x1, x0, h1, w0, w1, w2, w3, shift, 2, PACKED)
        activate(y, place, t, T, end, width, columns, inside, starts, x3, x2, x1, x0, w0, w1, w2, w3, shift, 3, PACKED)
        h1, h2, h3 = x3, x2, x1
        t += 4
        place += 4


@triton.jit
def slope(dy, z):
    """dL/dz from dL/dy."""
    s = sigmoid(z)
    return dy * (s + s * (z - s * z))


@triton.jit
def token(rows, t, T, inside, J: tl.constexpr, stride, WHOLE: tl.constexpr, EVEN: tl.constexpr):
    """Token t + J in fp32, zeros from T on; rows: addresses of token t."""
    if WHOLE and EVEN:
        return widened(tl.load(rows + J * stride))
    elif WHOLE:
        return widened(tl.load(rows + J * stride, mask=inside, other=0.0))
    else:
        return widened(tl.load(rows + J * stride, mask=inside & (t + J < T), other=0.0))


@triton.jit
def factor(scale, place, t, T, J: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr):
    """The row scale of token t + J, 1 by default."""
    if SCALED and WHOLE:
        return tl.load(scale + (place + J))
    elif SCALED:
        return tl.load(scale + (place + J), mask=t + J < T, other=0.0)
    else:
        return tl.full([], 1.0, tl.float32)


@triton.jit
def gradient_step(
    t, T, starts, x, h1, h2, h3, dy, p1, p2, p3, w0, w1, w2, w3, bias, s0, s1, s2, s3, sb,
    COUNT: tl.constexpr, PACKED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Token t of the backward pass: (dx of t-3, partial dx of t, t-1, t-2, sums of dw_0 .. dw_3 and dbias).

    h: the inputs before t; p: the partial dx of t-1, t-2, t-3. Without COUNT the sums do not change: the token belongs
    to the next strip and only completes this strip's dx.
    """
    if PACKED:
        m1, m2, m3 = same_document(starts, t, T)
        h1, h2, h3 = tl.where(m1, h1, 0.0), tl.where(m2, h2, 0.0), tl.where(m3, h3, 0.0)
    dz = slope(dy, bias + w0 * x + w1 * h1 + w2 * h2 + w3 * h3)
    if COUNT:
        s0 += dz * x
        s1 += dz * h1
        s2 += dz * h2
        s3 += dz * h3
        if BIAS:
            sb += dz
    if PACKED:
        return (
            p3 + tl.where(m3, w3 * dz, 0.0), w0 * dz, p1 + tl.where(m1, w1 * dz, 0.0),
            p2 + tl.where(m2, w2 * dz, 0.0), s0, s1, s2, s3, sb,
        )  # fmt: skip
    else:
        return p3 + w3 * dz, w0 * dz, p1 + w1 * dz, p2 + w2 * dz, s0, s1, s2, s3, sb


@triton.jit
def store_dx(rows, d_state, b, t, T, first, channels, inside, value, factor, J: tl.constexpr, D: tl.constexpr,
             W: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, STATE: tl.constexpr,
             SCALED: tl.constexpr):  # fmt: skip
    """dx of token u = t + J where u belongs to the strip; the state's gradient where u is before the row."""
    u = t + J
    value = times(value, factor, SCALED)
    narrow = value.to(rows.dtype.element_ty)
    if WHOLE and EVEN and J >= 0:
        tl.store(rows + J * D, narrow)
    elif WHOLE and EVEN:
        tl.store(rows + J * D, narrow, mask=t > first)
    elif WHOLE:
        tl.store(rows + J * D, narrow, mask=inside & (u >= first))
    else:
        tl.store(rows + J * D, narrow, mask=inside & (u >= first) & (u < T))
    if STATE:
        held = inside & (u < 0) & (u >= 1 - W)
        at = d_state + (b * (W - 1) + (u + W - 1)) * D + channels
        tl.store(at, value.to(d_state.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["T"])
def convolution_gradient_kernel(
    x,  # as the forward kernel's
    weight,
    bias,
    state,
    starts,
    scale,
    dy0,  # [B, T, D0], and the two other parts
    dy1,
    dy2,
    dx,  # out [B, T, D]
    d_state,  # out [B, W-1, D]; STATE only
    table,  # out [strips, D, W] fp32: the sums of dw over a program's tokens
    bias_table,  # out [strips, D] fp32: those of dbias; BIAS only
    T,
    stride: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    W: tl.constexpr,
    STRIP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    STATE: tl.constexpr,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
):
    D: tl.constexpr = D0 + D1 + D2
    dy, width, before, column = part_of(tl.program_id(0) % BLOCKS, dy0, dy1, dy2, D0, D1, D2, BLOCK)
    strip = (tl.program_id(0) // BLOCKS).to(tl.int64)
    per_row = tl.cdiv(T, STRIP)
    row = strip // per_row
    t = (tl.program_id(0) // BLOCKS) % per_row * STRIP
    first = t
    columns = column + tl.arange(0, BLOCK)
    inside = columns < width
    channels = before + columns
    w0 = weight_at(weight, channels, inside, 0, W)
    w1 = weight_at(weight, channels, inside, 1, W)
    w2 = weight_at(weight, channels, inside, 2, W)
    w3 = weight_at(weight, channels, inside, 3, W)
    shift = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        shift = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    h3 = before_strip(x, scale, state, row, t - 3, T, stride, channels, True, inside, D, W, STATE, SCALED)
    h2 = before_strip(x, scale, state, row, t - 2, T, stride, channels, True, inside, D, W, STATE, SCALED)
    h1 = before_strip(x, scale, state, row, t - 1, T, stride, channels, True, inside, D, W, STATE, SCALED)
    p1 = tl.zeros([BLOCK], tl.float32)
    p2 = tl.zeros([BLOCK], tl.float32)
    p3 = tl.zeros([BLOCK], tl.float32)
    s0 = tl.zeros([BLOCK], tl.float32)
    s1 = tl.zeros([BLOCK], tl.float32)
    s2 = tl.zeros([BLOCK], tl.float32)
    s3 = tl.zeros([BLOCK], tl.float32)
    sb = tl.zeros([BLOCK], tl.float32)
    place = row * T + t
    x += place * stride + channels
    dy += place * width + columns
    dx += place * D + channels
    c1 = tl.full([], 1.0, tl.float32)
    c2, c3 = c1, c1  # row scales of tokens t-1, t-2, t-3, whose dx this strip stores from its fourth token on
    for _ in tl.range(STRIP // 4 if WHOLE else tl.cdiv(tl.minimum(T - t, STRIP), 4), num_stages=STAGES):
        x0, d0 = token(x, t, T, inside, 0, stride, WHOLE, EVEN), token(dy, t, T, inside, 0, width, WHOLE, EVEN)
        x1, d1 = token(x, t, T, inside, 1, stride, WHOLE, EVEN), token(dy, t, T, inside, 1, width, WHOLE, EVEN)
        x2, d2 = token(x, t, T, inside, 2, stride, WHOLE, EVEN), token(dy, t, T, inside, 2, width, WHOLE, EVEN)
        x3, d3 = token(x, t, T, inside, 3, stride, WHOLE, EVEN), token(dy, t, T, inside, 3, width, WHOLE, EVEN)
        # read in the loop, so that the pipeline loads them ahead as well
        f0, f1 = factor(scale, place, t, T, 0, WHOLE, SCALED), factor(scale, place, t, T, 1, WHOLE, SCALED)
        f2, f3 = factor(scale, place, t, T, 2, WHOLE, SCALED), factor(scale, place, t, T, 3, WHOLE, SCALED)
        x0, x1, x2, x3 = times(x0, f0, SCALED), times(x1, f1, SCALED), times(x2, f2, SCALED), times(x3, f3, SCALED)
        o0, p1, p2, p3, s0, s1, s2, s3, sb = gradient_step(
            t, T, starts, x0, h1, h2, h3, d0, p1, p2, p3, w0, w1, w2, w3, shift, s0, s1, s2, s3, sb, True,
            PACKED, BIAS,
        )  # fmt: skip
        store_dx(dx, d_state, row, t, T, first, channels, inside, o0, c3, -3, D, W, WHOLE, EVEN, STATE, SCALED)
        o1, p1, p2, p3, s0, s1, s2, s3, sb = gradient_step(
            t + 1, T, starts, x1, x0, h1, h2, d1, p1, p2, p3, w0, w1, w2, w3, shift, s0, s1, s2, s3, sb, True,
            PACKED, BIAS,
        )  # fmt: skip
        store_dx(dx, d_state, row, t, T, first, channels, inside, o1, c2, -2, D, W, WHOLE, EVEN, STATE, SCALED)
        o2, p1, p2, p3, s0, s1, s2, s3, sb = gradient_step(
            t + 2, T, starts, x2, x1, x0, h1, d2, p1, p2, p3, w0, w1, w2, w3, shift, s0, s1, s2, s3, sb, True,
            PACKED, BIAS,
        )  # fmt: skip
        store_dx(dx, d_state, row, t, T, first, channels, inside, o2, c1, -1, D, W, WHOLE, EVEN, STATE, SCALED)
        o3, p1, p2, p3, s0, s1, s2, s3, sb = gradient_step(
            t + 3, T, starts, x3, x2, x1, x0, d3, p1, p2, p3, w0, w1, w2, w3, shift, s0, s1, s2, s3, sb, True,
            PACKED, BIAS,
        )  # fmt: skip
        store_dx(dx, d_state, row, t, T, first, channels, inside, o3, f0, 0, D, W, WHOLE, EVEN, STATE, SCALED)
        h1, h2, h3 = x3, x2, x1
        c1, c2, c3 = f3, f2, f1
        t += 4
        place += 4
        x += 4 * stride
        dy += 4 * width
        dx += 4 * D
    # three tokens of the next strip complete dx of this one's last three
    o0, o1, o2 = p3, p2, p1
    if t < T:
        x0, d0 = token(x, t, T, inside, 0, stride, WHOLE, EVEN), token(dy, t, T, inside, 0, width, WHOLE, EVEN)
        x1, d1 = token(x, t, T, inside, 1, stride, WHOLE, EVEN), token(dy, t, T, inside, 1, width, WHOLE, EVEN)
        x2, d2 = token(x, t, T, inside, 2, stride, WHOLE, EVEN), token(dy, t, T, inside, 2, width, WHOLE, EVEN)
        x0 = times(x0, factor(scale, place, t, T, 0, WHOLE, SCALED), SCALED)
        x1 = times(x1, factor(scale, place, t, T, 1, WHOLE, SCALED), SCALED)
        x2 = times(x2, factor(scale, place, t, T, 2, WHOLE, SCALED), SCALED)
        o0, p1, p2, p3, s0, s1, s2, s3, sb = gradient_step(
            t, T, starts, x0, h1, h2, h3, d0, p1, p2, p3, w0, w1, w2, w3, shift, s0, s1, s2, s3, sb, False,
            PACKED, BIAS,
        )  # fmt: skip
        o1, p1, p2, p3, s0, s1, s2, s3, sb = gradient_step(
            t + 1, T, starts, x1, x0, h1, h2, d1, p1, p2, p3, w0, w1, w2, w3, shift, s0, s1, s2, s3, sb, False,
            PACKED, BIAS,
        )  # fmt: skip
        o2, p1, p2, p3, s0, s1, s2, s3, sb = gradient_step(
            t + 2, T, starts, x2, x1, x0, h1, d2, p1, p2, p3, w0, w1, w2, w3, shift, s0, s1, s2, s3, sb, False,
            PACKED, BIAS,
        )  # fmt: skip
    store_dx(dx, d_state, row, t, T, first, channels, inside, o0, c3, -3, D, W, WHOLE, EVEN, False, SCALED)
    store_dx(dx, d_state, row, t, T, first, channels, inside, o1, c2, -2, D, W, WHOLE, EVEN, False, SCALED)
    store_dx(dx, d_state, row, t, T, first, channels, inside, o2, c1, -1, D, W, WHOLE, EVEN, False, SCALED)
    at = table + (strip * D + channels) * W
    tl.store(at + (W - 1), s0, mask=inside)
    if W > 1:
        tl.store(at + (W - 2), s1, mask=inside)
    if W > 2:
        tl.store(at + (W - 3), s2, mask=inside)
    if W > 3:
        tl.store(at + (W - 4), s3, mask=inside)
    if BIAS:
        tl.store(bias_table + strip * D + channels, sb, mask=inside)
