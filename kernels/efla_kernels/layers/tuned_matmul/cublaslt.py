"""Matmuls by an algorithm of our choice, through the C interface of the cuBLASLt that torch has loaded.

For a matmul cuBLASLt offers several algorithms, ordered by its heuristics, and torch takes the first. `choose` takes
another one where `matmul.py` names it. The constants of the C interface (enumerations, sizes of structures) are those
of cublasLt.h, the same from CUDA 11 on.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.bfloat16: 14}  # cudaDataType
COMPUTE_32F = 68
TRANSPOSE_A, TRANSPOSE_B = 3, 4  # cublasLtMatmulDescAttributes_t
MOST_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t
TILE, SPLIT, CUSTOM = 1, 2, 5  # cublasLtMatmulAlgoConfigAttributes_t
CANDIDATES = 32
WORKSPACE = 128 << 20  # bytes at most; a matmul takes what its algorithm needs
PLANS = 4096  # kept at most: sequence lengths may never repeat
ALIGNMENT = 256  # bytes of every matrix's first element, which the heuristics assume
ONE, ZERO = (ctypes.byref(ctypes.c_float(x)) for x in (1.0, 0.0))


class Algorithm(NamedTuple):
    """An algorithm's identity: cublasLtMatmulTile_t, the variant (custom option), parts of the summed axis."""

    tile: int
    custom: int
    split: int


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Handle:
    """A handle that cublasLt...Create returned, passed to other functions; destroyed with this object."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self._as_parameter_ = ctypes.c_void_p()
        _call(f"cublasLt{kind}Create", ctypes.byref(self._as_parameter_), *arguments)
        destroy = getattr(library(), f"cublasLt{kind}Destroy")
        weakref.finalize(self, destroy, self._as_parameter_).atexit = False


class Plan(NamedTuple):
    """A matmul that is ready to run: descriptors and the algorithm, with the bytes of workspace that it needs."""

    handle: Handle
    description: Handle
    first: Handle
    second: Handle
    out: Handle
    found: _Found

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs."""
        return _algorithm(self.found)


class Matrix(NamedTuple):
    """A row-major matrix [rows, columns] with `stride` elements from row to row; the matmul may use its transpose."""

    rows: int
    columns: int
    stride: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        """As the matmul sees it."""
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)


Choice = Callable[[Matrix, Matrix, list[Algorithm]], int | None]


def matrix(x: Tensor) -> Matrix | None:
    """The memory layout of x [rows, columns]; None where x is empty or cuBLASLt cannot read it without a copy."""
    if x.numel() == 0:
        return None
    for transposed, y in ((False, x), (True, x.t())):
        if y.stride(1) == 1 and y.stride(0) >= y.shape[1] and y.data_ptr() % ALIGNMENT == 0:
            return Matrix(y.shape[0], y.shape[1], y.stride(0), transposed)
    return None


@functools.cache
def library() -> ctypes.CDLL | None:
    """torch's cuBLASLt; None where it has none."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None


@functools.lru_cache(PLANS)
def choose(left: Matrix, right: Matrix, out: torch.dtype, device: int, choice: Choice) -> Plan | None:
    """The plan of left @ right for bf16 matrices, with fp32 sums and a contiguous result of type `out`.

    choice(left, right, offered algorithms) returns the index of one, or None. The plan is None then, where there is no
    cuBLASLt and, with a warning, where cuBLASLt reports an error.
    """
    if library() is None:
        return None
    try:
        return _chosen(left, right, out, device, choice)
    except RuntimeError as error:
        warnings.warn(f"{error}, for {left} and {right}: this matmul is torch's own", stacklevel=2)
        return None


def _chosen(left: Matrix, right: Matrix, out: torch.dtype, device: int, choice: Choice) -> Plan | None:
    M, N = left.shape[0], right.shape[1]
    # row-major C = A B is column-major C^T = B^T A^T, where a row-major matrix is its own transpose
    description = Handle("MatmulDesc", COMPUTE_32F, TYPES[torch.float32])
    for attribute, operand in ((TRANSPOSE_A, right), (TRANSPOSE_B, left)):
        flag = ctypes.c_int32(operand.transposed)
        _call("cublasLtMatmulDescSetAttribute", description, attribute, ctypes.byref(flag), _size(flag))
    first, second = (_layout(x.rows, x.columns, x.stride, torch.bfloat16) for x in (right, left))
    result = _layout(M, N, N, out)
    found = _offered(_handle(device), description, [first, second, result])
    index = choice(left, right, [_algorithm(x) for x in found])
    if index is None:
        return None
    # a copy, since an entry keeps its whole array alive
    return Plan(_handle(device), description, first, second, result, _Found.from_buffer_copy(found[index]))


def run(plan: Plan, a: Tensor, b: Tensor, out: Tensor, added: Tensor | None = None) -> None:
    """out = a b, or a b + added, on the current stream; `added` has out's layout and may be out.

    Raises RuntimeError where cuBLASLt reports an error.
    """
    size = plan.found.workspace
    workspace = torch.empty(size, dtype=torch.uint8, device=a.device) if size else None
    status = _matmul()(
        plan.handle, plan.description,
        ONE, b.data_ptr(), plan.first, a.data_ptr(), plan.second,
        ZERO if added is None else ONE, (out if added is None else added).data_ptr(), plan.out,
        out.data_ptr(), plan.out,
        ctypes.byref(plan.found), None if workspace is None else workspace.data_ptr(), size,
        torch.cuda.current_stream(a.device).cuda_stream,
    )  # fmt: skip
    _check("cublasLtMatmul", status)


@functools.cache
def _matmul() -> Any:
    """cublasLtMatmul with its argument types declared, which makes the call faster."""
    function = library().cublasLtMatmul  # type: ignore[union-attr]
    function.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
    return function


@functools.cache
def _handle(device: int) -> Handle:
    with torch.cuda.device(device):
        return Handle("")


def _call(name: str, *arguments: Any) -> None:
    _check(name, getattr(library(), name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise RuntimeError(f"{name} of cuBLASLt: expected status 0, got {status} (cublasStatus_t)")


def _layout(rows: int, columns: int, stride: int, dtype: torch.dtype) -> Handle:
    """The layout of a row-major matrix, which is column-major [columns, rows]."""
    sizes = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(stride)
    return Handle("MatrixLayout", TYPES[dtype], *sizes)


def _offered(handle: Handle, description: Handle, layouts: list[Handle]) -> list[_Found]:
    """The algorithms that the heuristics offer, best first."""
    preference = Handle("MatmulPreference")
    most = ctypes.c_size_t(WORKSPACE)
    _call("cublasLtMatmulPreferenceSetAttribute", preference, MOST_WORKSPACE, ctypes.byref(most), _size(most))
    found, count = (_Found * CANDIDATES)(), ctypes.c_int()
    problem = (handle, description, *layouts, layouts[-1], preference)
    _call("cublasLtMatmulAlgoGetHeuristic", *problem, CANDIDATES, found, ctypes.byref(count))
    return [x for x in found[: count.value] if x.state == 0]


def _algorithm(found: _Found) -> Algorithm:
    values = []
    for attribute in (TILE, CUSTOM, SPLIT):
        value, written = ctypes.c_uint32(), ctypes.c_size_t()
        place = ctypes.byref(value), _size(value), ctypes.byref(written)
        _call("cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(found), attribute, *place)
        values.append(value.value)
    return Algorithm(*values)


def _size(x: Any) -> ctypes.c_size_t:
    return ctypes.c_size_t(ctypes.sizeof(x))
