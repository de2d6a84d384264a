"""Linear and cross-entropy in one registered op, without the logits of all tokens in memory.

For rows in blocks of R:

    logits = h W^T (in fp32),  loss_i = log sum_v exp(logits_iv) - logits_it,
    G = softmax(logits) - onehot(t),  dh = G W,  dW += G^T h (in fp32).

The forward pass computes the gradients and keeps them instead of the logits. The backward pass scales them by the
incoming gradient and rounds dW to the weight's type.

One buffer of R fp32 rows serves all blocks: a row's G, in the inputs' type, takes the place of its logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.launch.dispatch import launch
from efla_kernels.launch.interpreter import INTERPRETED
from efla_kernels.launch.op import Autograd, register, wants_gradient
from efla_kernels.layers.tuned_matmul.matmul import addmm_, matmul

SCALED = 2048  # elements of a program of `scale_kernel`
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MOST_HELD = 32768  # columns of a row that one program's registers hold, 32 in each of 1024 threads
BLOCK = 16384  # columns at a time of a longer row, 16 in each thread: a multiprocessor runs two rows at once


@triton.jit
def exponent(x, c):
    """x log2(e) - c, rounded once."""
    if INTERPRETED:
        return (x.to(tl.float64) * LOG2_E - c).to(tl.float32)
    else:
        return tl.fma(x, LOG2_E, -c)


@triton.jit
def exp2(x):
    """2^x in one instruction; denormal results become 0."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def raised(x, c):
    """exp(x - top), up to the rounding of c, for c = top log2(e): a multiply-add and an exponential."""
    return exp2(exponent(x, c))


@triton.jit
def scaled_top(top):
    """The c of `raised`; finite also where all logits are -inf."""
    return tl.where(top == float("-inf"), 0.0, top * LOG2_E)


@triton.jit
def fetch(row, V, LINES: tl.constexpr):
    """Prefetch a row of V fp32 numbers into the L2 cache, in lines of 32."""
    place = (row + tl.minimum(tl.arange(0, LINES) * 32, V - 1)).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def cross_entropy_kernel(
    logits,  # [R, V] fp32
    gradient,  # out, the same memory; rows `stride` elements of its own type apart
    targets,  # [R], negative where ignored
    losses,  # out [R] fp32
    V,
    stride,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One row: its loss, and with GRADIENT softmax - onehot; both 0 where the target is ignored.

    HELD: the row fits into BLOCK columns, is read once and stays in registers as exponentials. A row that fills a
    multiprocessor's registers has no other program to hide its wait for memory, so it prefetches the row AHEAD rows
    later into the L2 cache. Without HELD a row is read twice, with a running maximum for 16 columns at a time.
    """
    row = tl.program_id(0).to(tl.int64)
    following = logits + tl.minimum(row + AHEAD, tl.num_programs(0) - 1) * V
    logits += row * V
    gradient += row * stride
    target = tl.load(targets + row)
    counted = target >= 0
    end = tl.where(counted, V, 0)  # an ignored row is not read: its gradient is 0 whatever the logits are
    at_target = tl.load(logits + tl.maximum(target, 0))
    if HELD:
        columns = tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < end, other=float("-inf"), eviction_policy="evict_first")
        if AHEAD:
            fetch(following, V, BLOCK // 32)
        top = tl.max(x, 0)
        c = scaled_top(top)
        e = raised(x, c)
        total = tl.sum(e, 0)
    else:
        # lanes first, so that threads are laid along them and the other axes are within a thread
        LANES: tl.constexpr = BLOCK // 16
        lanes, sixteen = tl.arange(0, LANES)[:, None, None], tl.arange(0, 4)
        columns = lanes * 4 + sixteen[None, :, None] * (4 * LANES) + sixteen[None, None, :]
        largest = tl.full([LANES], float("-inf"), tl.float32)
        scaled = largest
        sums = tl.zeros([LANES], tl.float32)
        for start in range(0, V, BLOCK):
            x = tl.load(logits + start + columns, mask=start + columns < end, other=float("-inf"))
            largest = tl.maximum(largest, tl.max(tl.max(x, 2), 1))
            c = scaled_top(largest)
            sums = sums * exp2(scaled - c) + tl.sum(tl.sum(raised(x, c[:, None, None]), 2), 1)
            scaled = largest * LOG2_E
        top = tl.max(largest, 0)
        c = scaled_top(top)
        total = tl.sum(sums * exp2(scaled - c), 0)
    log_sum = tl.log(total) - exponent(top, c) * LN_2  # of exp(x - top), without the rounding error of c
    tl.store(losses + row, tl.where(counted, top - at_target + log_sum, 0.0))
    if GRADIENT:
        factor = tl.where(counted, 1.0 / total, 0.0)
        if HELD:
            tl.debug_barrier()  # the gradient overwrites logits that other threads have loaded
            tl.store(gradient + columns, (e * factor).to(gradient.dtype.element_ty), mask=columns < V)
        else:
            for start in range(0, V, BLOCK):
                at = start + columns
                x = tl.load(logits + at, mask=at < end, other=float("-inf"), eviction_policy="evict_first")
                # the next store overwrites logits that other threads have loaded by now, none of later blocks
                tl.debug_barrier()
                p = raised(x, c) * factor
                tl.store(gradient + at, p.to(gradient.dtype.element_ty), mask=at < V)
        tl.debug_barrier()  # the target's own number comes last
        p = raised(at_target, c) * factor - 1.0
        tl.store(gradient + target, p.to(gradient.dtype.element_ty), mask=counted)


def launch_shape(V: int, device: torch.device) -> dict[str, Any]:
    """Constants and warps of the kernel for rows of V columns."""
    if V > MOST_HELD:
        return {"BLOCK": BLOCK, "HELD": False, "AHEAD": 0, "num_warps": BLOCK // 512}
    block = max(1024, triton.next_power_of_2(V))
    fills = block == MOST_HELD and device.type == "cuda"
    ahead = torch.cuda.get_device_properties(device).multi_processor_count if fills else 0
    return {"BLOCK": block, "HELD": True, "AHEAD": ahead, "num_warps": block // 1024}


@triton.jit
def scale_kernel(x, factor, y, N, BLOCK: tl.constexpr):
    """y = factor x in fp32, for contiguous x of N elements; factor is a number in fp32 on the device."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    scaled = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(y + at, scaled.to(y.dtype.element_ty), mask=inside)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor x in `dtype`. torch would round the factor (often 1 / tokens) to 16 bits first, off by up to 0.4 %."""
    y = torch.empty_like(x, dtype=dtype)
    launch(scale_kernel, -(-x.numel() // SCALED), x, factor.float(), y, x.numel(), BLOCK=SCALED, num_warps=4)
    return y


class Inputs(NamedTuple):
    """Inputs of the op."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    targets: Tensor  # [N] int64, -100 ignored
    rows: int  # R
    gradients: bool  # whether the forward pass computes them


class Outputs(NamedTuple):
    """Outputs of the op; the gradients of a loss with incoming gradient 1 are empty if not wanted."""

    loss: Tensor  # fp32 scalar
    d_hidden: Tensor  # [N, D]
    d_weight: Tensor  # [V, D] fp32


class OutputGradients(NamedTuple):
    """The gradient that arrives."""

    loss: Tensor


class Kept(NamedTuple):
    """What the backward pass reads."""

    d_hidden: Tensor
    d_weight: Tensor


class Gradients(NamedTuple):
    """Gradients of the inputs."""

    hidden: Tensor
    weight: Tensor


def _forward(i: Inputs) -> Outputs:
    (N, _), V, hidden, weight = i.hidden.shape, i.weight.shape[0], i.hidden, i.weight
    losses = hidden.new_empty(N, dtype=torch.float32)
    d_hidden = torch.empty_like(hidden) if i.gradients else hidden.new_empty(0)
    d_weight = weight.new_zeros(weight.shape if i.gradients else 0, dtype=torch.float32)
    buffer = hidden.new_empty(i.rows, V, dtype=torch.float32)
    shape = launch_shape(V, hidden.device)
    rows = buffer.view(hidden.dtype)  # [R, V * 4 / size of the type]: of each row the first V are used
    for start in range(0, N, max(i.rows, 1)):
        h, t = hidden[start : start + i.rows], i.targets[start : start + i.rows]
        R = h.shape[0]
        matmul(h, weight.t(), out=buffer[:R])
        cross_entropy_kernel[(R,)](buffer, rows, t, losses[start:], V, rows.stride(0), GRADIENT=i.gradients, **shape)
        if i.gradients:
            gradient = rows[:R, :V]
            matmul(gradient, weight, out=d_hidden[start : start + R])
            addmm_(d_weight, gradient.t(), h)
    return Outputs(losses.sum(), d_hidden, d_weight)


def _fake(i: Inputs) -> Outputs:
    return Outputs(
        loss=i.hidden.new_empty((), dtype=torch.float32),
        d_hidden=i.hidden.new_empty(i.hidden.shape if i.gradients else 0),
        d_weight=i.weight.new_empty(i.weight.shape if i.gradients else 0, dtype=torch.float32),
    )


def _keep(i: Inputs, o: Outputs) -> Kept:
    return Kept(o.d_hidden, o.d_weight)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    dtype = kept.d_hidden.dtype  # the weight's too
    return Gradients(_scaled(kept.d_hidden, d.loss, dtype), _scaled(kept.d_weight, d.loss, dtype))


def _backward_fake(d: OutputGradients, kept: Kept) -> Gradients:
    return Gradients(torch.empty_like(kept.d_hidden), torch.empty_like(kept.d_weight, dtype=kept.d_hidden.dtype))


cross_entropy_op = register(
    "linear_cross_entropy", _forward, _fake, Autograd(_keep, _backward, _backward_fake), results=1
)


def fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """`linear_cross_entropy` on a GPU in blocks of `rows` rows; hidden and weight in bf16, fp16 or fp32."""
    gradients = wants_gradient((hidden, weight))
    return cross_entropy_op(Inputs(hidden.contiguous(), weight, targets.contiguous(), rows, gradients))
