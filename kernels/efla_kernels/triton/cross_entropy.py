"""Linear layer and cross-entropy together, without the logits of all tokens in memory.

For rows in blocks of R:  logits = h W^T (fp32 sums of 16-bit products),  loss_i = log sum_v exp(logits_iv) - logits_it,
G = softmax(logits) - onehot(t),  dh = G W,  dW += G^T h. The gradients are ready in the forward pass, which keeps them
instead of the logits; the backward pass only scales them by the incoming gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS = 4096  # tokens at a time: 0.5 GiB of fp32 logits at a vocabulary of 32000


@triton.jit
def cross_entropy_kernel(logits, targets, losses, gradient, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its loss, and with GRADIENT softmax - onehot; both 0 where the target is ignored (negative)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(logits + row * V + start + columns, mask=start + columns < V, other=float("-inf"))
        new = tl.maximum(largest, x)
        safe = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - safe) + tl.exp(x - safe)
        largest = new
    top = tl.max(largest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    counted = target >= 0
    at_target = tl.load(logits + row * V + tl.maximum(target, 0))
    tl.store(losses + row, tl.where(counted, log_total - at_target, 0.0))
    if GRADIENT:
        for start in range(0, V, BLOCK):
            inside = start + columns < V
            x = tl.load(logits + row * V + start + columns, mask=inside, other=float("-inf"))
            p = tl.exp(x - log_total) - tl.where(start + columns == target, 1.0, 0.0)
            p = tl.where(counted, p, 0.0)
            tl.store(gradient + row * V + start + columns, p.to(gradient.dtype.element_ty), mask=inside)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in fp32: 16-bit products are summed in fp32 and the sum is not rounded."""
    return a @ b if a.dtype == torch.float32 else torch.mm(a, b, out_dtype=torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wanted, V = any(ctx.needs_input_grad), weight.shape[0]
        losses = torch.empty(targets.shape[0], device=hidden.device, dtype=torch.float32)
        d_hidden = torch.empty_like(hidden) if wanted else None
        d_weight = torch.zeros(weight.shape, device=weight.device, dtype=torch.float32) if wanted else None
        for h, t, loss, start in zip(
            hidden.split(ROWS), targets.split(ROWS), losses.split(ROWS), range(0, len(targets), ROWS), strict=True
        ):
            logits = _product(h, weight.t())
            gradient = torch.empty_like(logits, dtype=h.dtype) if wanted else logits
            cross_entropy_kernel[(h.shape[0],)](logits, t, loss, gradient, V, GRADIENT=wanted, BLOCK=4096, num_warps=8)
            if d_hidden is not None and d_weight is not None:
                torch.mm(gradient, weight, out=d_hidden[start : start + h.shape[0]])
                d_weight += _product(gradient.t(), h)
        if d_hidden is not None and d_weight is not None:
            ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * gradient.to(d_hidden.dtype), d_weight * gradient.to(d_weight.dtype), None


def fused_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """`efla_kernels.linear_cross_entropy` on a GPU; hidden and weight in bf16, fp16 or fp32."""
    return _LinearCrossEntropy.apply(hidden.contiguous(), weight, targets.contiguous())
