"""Linear layer and cross-entropy together, without the logits of all tokens in memory.

For rows in blocks of R, as many as `logit_rows` says:

    logits = h W^T (fp32 sums of 16-bit products),  loss_i = log sum_v exp(logits_iv) - logits_it,
    G = softmax(logits) - onehot(t),  dh = G W,  dW += G^T h (fp32 sums).

The gradients are ready in the forward pass, which keeps them instead of the logits; the backward pass only scales them
by the incoming gradient, and rounds dW to the weight's type.

One buffer of R fp32 rows serves all blocks: a row's G, in the inputs' type, takes the place of its logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from efla_kernels.loss import logit_rows
from efla_kernels.triton.dispatch import launch

SCALED = 2048  # elements per program of `scale_kernel`
BLOCK = 8192  # columns at a time, 16 warps: two rows per multiprocessor, whose second pass finds them in the L2 cache


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
):
    """One row: its loss, and with GRADIENT softmax - onehot; both 0 where the target is ignored."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    gradient += row * stride
    target = tl.load(targets + row)
    at_target = tl.load(logits + tl.maximum(target, 0))
    columns = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + start + columns, mask=start + columns < V, other=float("-inf"))
        new = tl.maximum(largest, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - safe) + tl.exp(x - safe)
        largest = new
    top = tl.max(largest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    counted = target >= 0
    tl.store(losses + row, tl.where(counted, log_total - at_target, 0.0))
    if GRADIENT:
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            x = tl.load(logits + start + columns, mask=inside, other=float("-inf"))
            # what is stored next lies over logits that other threads load up to here, never over later ones
            tl.debug_barrier()
            p = tl.exp(x - log_total) - tl.where(start + columns == target, 1.0, 0.0)
            p = tl.where(counted, p, 0.0)
            tl.store(gradient + start + columns, p.to(gradient.dtype.element_ty), mask=inside)


@triton.jit
def scale_kernel(x, factor, y, N, BLOCK: tl.constexpr):
    """y = factor x in fp32, for contiguous x of N elements; factor is a number in fp32 on the device."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    scaled = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(y + at, scaled.to(y.dtype.element_ty), mask=inside)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor x in `dtype`; torch would round the factor (1 / tokens, often) to 16 bits first, off by up to 0.4 %."""
    y = torch.empty_like(x, dtype=dtype)
    launch(scale_kernel, -(-x.numel() // SCALED), x, factor.float(), y, x.numel(), BLOCK=SCALED, num_warps=4)
    return y


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a b in fp32: 16-bit products are summed in fp32 and the sum is not rounded."""
    if a.dtype == torch.float32:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)


@functools.cache
def _adds_to_fp32(device: torch.device) -> bool:
    """Whether addmm adds 16-bit products to an fp32 sum here; torch before 2.9 wants the sum in 16 bits too."""
    factor = torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, total in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    elif _adds_to_fp32(a.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wanted, (N, V) = any(ctx.needs_input_grad), (hidden.shape[0], weight.shape[0])
        losses = torch.empty(N, device=hidden.device, dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_weight = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32) if wanted else None
        most = logit_rows(N, V)
        buffer = torch.empty(most, V, device=hidden.device, dtype=torch.float32)
        rows = buffer.view(hidden.dtype)  # [R, V * 4 / size of the type]: of each row the first V are used
        for start in range(0, N, max(most, 1)):
            h, t = hidden[start : start + most], targets[start : start + most]
            R = h.shape[0]
            _multiply(h, weight.t(), buffer[:R])
            cross_entropy_kernel[(R,)](
                buffer, rows, t, losses[start:], V, rows.stride(0), GRADIENT=wanted, BLOCK=BLOCK, num_warps=16
            )
            if d_hidden is not None and d_weight is not None:
                gradient = rows[:R, :V]
                torch.mm(gradient, weight, out=d_hidden[start : start + R])
                _add_product(d_weight, gradient.t(), h)
        del buffer, rows
        if d_hidden is not None and d_weight is not None:
            ctx.save_for_backward(d_hidden, d_weight)
            ctx.dtype = weight.dtype
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return _scaled(d_hidden, gradient, d_hidden.dtype), _scaled(d_weight, gradient, ctx.dtype), None


def fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`efla_kernels.linear_cross_entropy` on a GPU; hidden and weight in bf16, fp16 or fp32."""
    return _LinearCrossEntropy.apply(hidden.contiguous(), weight, targets.contiguous())
