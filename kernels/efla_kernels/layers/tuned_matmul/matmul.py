"""Matmuls by the algorithm that takes the least time where the GPU's power limits them.

The matmuls of a training step keep a GPU at its power limit, where its clock depends on what each of them draws. torch
follows the heuristics of cuBLASLt, which know the fastest algorithm at full clock. At the limit others are faster.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from efla_kernels.layers.tuned_matmul import cublaslt
from efla_kernels.layers.tuned_matmul.cublaslt import Algorithm, Matrix

MULTIPROCESSORS = 132
# tiles are columns x rows, as cuBLASLt sees them; its variants have numbers but no names (see `Algorithm`)
TILES_176_128, TILES_128_160, TILES_128_128 = Algorithm(201, 2, 1), Algorithm(29, 1, 1), Algorithm(20, 3, 1)
THIRDS_256_128 = Algorithm(24, 7, 3)  # parts and sum in fp32: 12 bytes of workspace per element
MANY_ROWS, WIDE = 4096, 4096
SHORT_SUM, SHORT_SUM_OF_WEIGHTS, LONG_SUM = 3072, 4096, 32768


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a b of [M, K] and [K, N], written to `out` where it is given.

    The result has the operands' type. On a GPU `out` may be fp32, the type of the sums.
    """
    dtype = a.dtype if out is None else out.dtype
    plan = _plan(a, b, dtype, out)
    if plan is not None:
        out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
        cublaslt.run(plan, a, b, out)
        return out
    return torch.mm(a, b, out=out) if dtype == a.dtype else torch.mm(a, b, out_dtype=dtype, out=out)


def addmm_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; total is contiguous and has the operands' type, or on a GPU fp32."""
    plan = _plan(a, b, total.dtype, total)
    if plan is not None:
        cublaslt.run(plan, a, b, total, added=total)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    elif _adds_to_fp32(a.device):
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32)


def addmm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a b in one type. torch's addmm would first copy x to the result."""
    plan = _plan(a, b, x.dtype, x, apart=True) if x.dtype == a.dtype else None
    if plan is None:
        return torch.addmm(x, a, b)
    out = torch.empty_like(x)
    cublaslt.run(plan, a, b, out, added=x)
    return out


def _plan(
    a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None, apart: bool = False
) -> cublaslt.Plan | None:
    """The plan of a b with the result in `dtype`; None: torch's own matmul, which reports operands that do not fit.

    out: the result, or a matrix of its layout. apart: use cuBLASLt also where `preferred` names no
    algorithm, with torch's choice.
    """
    if torch.compiler.is_compiling():  # it would trace through the caches below; it does not trace into our ops
        return None
    if not a.is_cuda or a.dtype != torch.bfloat16 or b.dtype != a.dtype or b.device != a.device:
        return None
    device = a.device.index
    measured = _measured(device)
    if device != torch.cuda.current_device() or not (measured or apart):  # kernels run on the current device
        return None
    left, right = cublaslt.matrix(a), cublaslt.matrix(b)
    if left is None or right is None:
        return None
    result = Matrix(left.shape[0], right.shape[1], right.shape[1], transposed=False)
    if out is not None and (out.device != a.device or cublaslt.matrix(out) != result):
        return None
    choice = preferred if not apart else preferred_or_first if measured else first
    return cublaslt.choose(left, right, dtype, device, choice)


def preferred(left: Matrix, right: Matrix, offered: list[Algorithm]) -> int | None:
    """The index of the offered algorithm for the matmul left @ right; None: torch's own choice.

    Measured on an H200 at its power limit, each candidate alone for half a second (docs/speed.md). For a short summed
    axis the fastest has two groups of warps that take turns: one writes its tile while the other multiplies. A weight's
    gradient over very many tokens splits the summed axis into three, where the parts fill all multiprocessors.
    """
    (M, K), (_, N) = left.shape, right.shape
    wanted: list[Algorithm] = []
    if left.transposed:  # gradients of weights: dy^T x
        if K <= SHORT_SUM_OF_WEIGHTS:
            wanted.append(TILES_128_128)
        elif K >= LONG_SUM and -(-M // 128) * -(-N // 256) * THIRDS_256_128.split % MULTIPROCESSORS == 0:
            wanted.append(THIRDS_256_128)
    elif M >= MANY_ROWS and K <= SHORT_SUM:
        if N >= WIDE and -N % 176 <= N // 100:
            wanted.append(TILES_176_128)
        wanted.append(TILES_128_160)
    return next((offered.index(x) for x in wanted if x in offered), None)


def first(left: Matrix, right: Matrix, offered: list[Algorithm]) -> int | None:
    """The heuristics' first, which is torch's choice."""
    return 0 if offered else None


def preferred_or_first(left: Matrix, right: Matrix, offered: list[Algorithm]) -> int | None:
    """The preferred algorithm, else the heuristics' first."""
    index = preferred(left, right, offered)
    return first(left, right, offered) if index is None else index


@functools.cache
def _measured(device: int) -> bool:
    """Whether `preferred` was measured on this kind of GPU: H200, or H100 with as many multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.multi_processor_count) == (9, MULTIPROCESSORS)


@functools.cache
def _adds_to_fp32(device: torch.device) -> bool:
    """Whether torch.addmm adds a matmul of 16-bit operands to an fp32 tensor; before torch 2.9 it does not."""
    factor = torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    total = torch.zeros(16, 16, device=device)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True
