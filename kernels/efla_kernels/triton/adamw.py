"""A step of AdamW (arXiv 1711.05101) on many tensors in one kernel, or none, as the device decides.

    g <- g / divisor      m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
    p <- p - lr weight_decay p - lr / (1 - b1^n) m / (sqrt(v) / sqrt(1 - b2^n) + eps)

What `torch.optim.AdamW(fused=True)` computes, in 28 bytes of memory traffic an element where it takes 32 (with a
divisor it writes g back) in launches of 320 programs each, which are too few for a GPU to be busy to the end of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.triton.dispatch import launch

BLOCK, WARPS = 2048, 4  # elements of a program: four times 16 bytes of each of p, g, m, v for a thread


@triton.jit(do_not_specialize=["tensors"])
def adamw_kernel(
    firsts, table, divisor, taken, lr, decay, b1, log_b1, rest_b1, b2, log_b2, rest_b2, eps, tensors,
    SLOTS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor.

    firsts: int32 [tensors], the first program of each. table: int64 [tensors, 6], addresses of p, g, m, v (fp32) and n
    (fp32, of the updates before), then the number of elements. divisor, taken: fp32 scalars; nothing is done where
    taken is 0. decay: lr weight_decay. log_b, rest_b: the logarithm of b and 1 - b. SLOTS: a power of two, at least
    `tensors`. ALIGNED: addresses are multiples of 16 bytes, numbers of elements of 4.
    """
    if tl.load(taken) == 0.0:
        return
    slots = tl.arange(0, SLOTS)
    starts = tl.load(firsts + slots, mask=slots < tensors, other=2**31 - 1)
    mine = tl.sum((starts <= tl.program_id(0)).to(tl.int32)) - 1
    row = table + mine * 6
    p = tl.load(row).to(tl.pointer_type(tl.float32))
    g = tl.load(row + 1).to(tl.pointer_type(tl.float32))
    m = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    v = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    n = tl.load(tl.load(row + 4).to(tl.pointer_type(tl.float32))) + 1.0
    size = tl.load(row + 5)
    if ALIGNED:
        p, g = tl.multiple_of(p, 16), tl.multiple_of(g, 16)
        m, v = tl.multiple_of(m, 16), tl.multiple_of(v, 16)
        size = tl.multiple_of(size, 4)
    start = (tl.program_id(0) - tl.load(firsts + mine)).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    inside = at < size
    grad = tl.div_rn(tl.load(g + at, mask=inside, other=0.0), tl.load(divisor))
    mean = b1 * tl.load(m + at, mask=inside, other=0.0) + rest_b1 * grad
    square = b2 * tl.load(v + at, mask=inside, other=0.0) + rest_b2 * grad * grad
    # 1 - b^n in fp64: for b near 1 it is a small difference
    rate = lr / (1.0 - tl.exp((n * log_b1).to(tl.float64))).to(tl.float32)
    root = tl.sqrt((1.0 - tl.exp((n * log_b2).to(tl.float64))).to(tl.float32))
    weight = tl.load(p + at, mask=inside, other=0.0)
    weight -= decay * weight
    weight -= rate * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root) + eps)
    tl.store(p + at, weight, mask=inside)
    tl.store(m + at, mean, mask=inside)
    tl.store(v + at, square, mask=inside)


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    divisor: Tensor,
    skip: Tensor,
) -> None:
    """Change parameters, means (m), squares (v) and steps (n, of each tensor the updates it has seen) in place, or
    nothing where `skip`, a bool scalar on their device, is true.

    All tensors are contiguous, fp32 and on one device, steps and divisor scalars, the others of their parameter's
    shape. The host does not wait. Raises ValueError for a tensor that is not so.
    """
    # parts of tensors that ranks share need not be aligned
    tables: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for tensors in zip(parameters, gradients, means, squares, steps, strict=True):
        for x in tensors:
            if x.dtype != torch.float32 or not x.is_contiguous() or x.device != skip.device:
                raise ValueError(
                    f"adamw: expected contiguous float32 tensors on {skip.device}, got {x.dtype} {list(x.shape)} of "
                    f"strides {x.stride()} on {x.device}"
                )
        if len({x.shape for x in tensors[:-1]}) > 1:
            raise ValueError(f"adamw: expected p, g, m and v of one shape, got {[list(x.shape) for x in tensors[:-1]]}")
        *addresses, step = (x.data_ptr() for x in tensors)
        size = tensors[0].numel()
        aligned = size % 4 == 0 and not any(address % 16 for address in addresses)
        tables[aligned].append((*addresses, step, size))
    taken = (~skip).to(torch.float32)
    log_b1, log_b2 = (math.log(beta) if beta else -math.inf for beta in betas)
    numbers = lr, lr * weight_decay, betas[0], log_b1, 1 - betas[0], betas[1], log_b2, 1 - betas[1], eps
    for aligned, table in tables.items():
        firsts = list(itertools.accumulate((-(-row[-1] // BLOCK) for row in table), initial=0))
        if programs := firsts.pop():
            launch(
                adamw_kernel, programs, _sent(firsts, torch.int32, skip.device), _sent(table, torch.int64, skip.device),
                divisor, taken, *map(float, numbers), len(table),
                num_warps=WARPS, SLOTS=triton.next_power_of_2(len(table)), ALIGNED=aligned, BLOCK=BLOCK,
            )  # fmt: skip
    if steps:
        torch._foreach_add_(list(steps), taken)


def _sent(numbers: Sequence[int] | Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host on the device, without waiting."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
