"""Products and the linear map made of them, on a CPU; the algorithms of GPUs are in tests/gpu/test_products.py."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from efla_kernels import linear, norm_linear
from efla_kernels.layers import norm_linear as norms
from efla_kernels.layers.linear import linear_op
from efla_kernels.layers.tuned_matmul import cublaslt
from efla_kernels.layers.tuned_matmul import matmul as matmuls
from efla_kernels.layers.tuned_matmul.cublaslt import Algorithm, Matrix, matrix
from efla_kernels.layers.tuned_matmul.matmul import addmm, addmm_, matmul, preferred


def test_products_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 7, generator=generator), torch.randn(3, 7, generator=generator).t()
    assert torch.equal(matmul(a, b), a @ b)
    out = torch.empty(5, 3)
    assert matmul(a, b, out=out) is out and torch.equal(out, a @ b)
    addmm_(out, a, b)
    assert torch.allclose(out, 2 * (a @ b))
    assert torch.allclose(addmm(out, a, b), 3 * (a @ b)) and torch.allclose(out, 2 * (a @ b))


def test_how_a_matrix_lies_in_memory() -> None:
    room = torch.zeros(1024, dtype=torch.bfloat16)  # a CPU's allocator promises less than a GPU's
    start = -room.data_ptr() % 256 // 2
    base = room[start : start + 48].view(6, 8)
    assert matrix(base) == Matrix(6, 8, 8, False)
    assert matrix(base.t()) == Matrix(6, 8, 8, True)
    assert matrix(base[:, :4]) == Matrix(6, 4, 8, False)
    assert matrix(base[:, ::2]) is None  # no row-major order either way
    assert matrix(base[:, 1:]) is None  # two bytes off
    assert matrix(base[:0]) is None and matrix(base[:, :0]) is None  # nothing to multiply
    assert matrix(base[:1].expand(6, 8)) is None and matrix(base[:1, :1].expand(6, 8)) is None
    both = [matrix(y) for y in (base, base.t())]
    assert [m.shape for m in both if m is not None] == [(6, 8), (8, 6)]


class Library:
    """A cuBLASLt that counts what it has made, offers two algorithms, and reports the error `status` when asked."""

    def __init__(self, status: int = 0) -> None:
        self.alive, self.status = 0, status

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.alive += name.endswith("Create") - name.endswith("Destroy")
            if name == "cublasLtMatmulAlgoGetHeuristic":
                arguments[-1]._obj.value = 2
                return self.status
            if name == "cublasLtMatmulAlgoConfigGetAttribute":
                ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_uint32))[0] = 7
            return 0

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    made = Library()
    monkeypatch.setattr(cublaslt, "library", lambda: made)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    cublaslt.choose.cache_clear()
    yield made
    cublaslt.choose.cache_clear()


def choose(rows: int, index: int | None) -> cublaslt.Plan | None:
    left, right = of(rows, 8, 8)
    return cublaslt.choose(left, right, torch.bfloat16, 0, lambda *_: index)


def test_plans_of_many_lengths_are_let_go(library: Library) -> None:
    plan = choose(1, 1)
    assert plan is not None and plan.algorithm == Algorithm(7, 7, 7) and library.alive == 4
    for rows in range(2, 2 * cublaslt.PLANS):
        choose(rows, 1)
    gc.collect()
    assert library.alive == 4 * (cublaslt.PLANS + 1)  # `plan` is still held here
    cublaslt.choose.cache_clear()
    assert choose(1, None) is None and library.alive == 4


def test_an_error_leaves_the_product_to_torch(library: Library) -> None:
    library.status = 15
    with pytest.warns(UserWarning, match=r"expected status 0, got 15 .*rows=3,.* torch's own"):
        assert choose(3, 0) is None
    gc.collect()
    assert library.alive == 0


def on_gpu(device: int = 0, dtype: torch.dtype = torch.bfloat16, offset: int = 0) -> Any:
    """What `_plan` asks of a tensor on a GPU."""
    x = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", device), shape=(8, 8))
    x.numel, x.stride, x.data_ptr, x.t = lambda: 64, (8, 1).__getitem__, lambda: 4096 + offset, lambda: x
    return x


def test_what_does_not_fit_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as bf16 on the current device, numbers of another type or place would be garbage, or a fault."""
    monkeypatch.setattr(matmuls, "_measured", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cublaslt, "choose", lambda *_: "plan")
    good, dtype = on_gpu(), torch.bfloat16
    assert matmuls._plan(good, good, dtype) == matmuls._plan(good, good, torch.float32, on_gpu()) == "plan"
    for bad in (on_gpu(dtype=torch.float32), on_gpu(device=1), on_gpu(offset=128)):
        assert matmuls._plan(good, bad, dtype) is None and matmuls._plan(bad, good, dtype) is None
    assert matmuls._plan(good, torch.zeros(8, 8, dtype=dtype), dtype) is None  # of the CPU
    assert matmuls._plan(on_gpu(device=1), on_gpu(device=1), dtype) is None
    for bad in (on_gpu(offset=128), on_gpu(device=1), torch.zeros(8, 8, dtype=dtype)):
        assert matmuls._plan(good, good, dtype, bad) is None
    for shape, strides in (((8, 8), (16, 1)), ((8, 8), (1, 8)), ((4, 8), (8, 1)), ((8, 16), (16, 1))):
        out = torch.empty(1024, dtype=dtype)[-128:].as_strided(shape, strides)
        lies = {"device": good.device, "data_ptr": lambda: 4096}
        out = SimpleNamespace(shape=shape, numel=out.numel, stride=out.stride, t=out.t, **lies)
        assert matmuls._plan(good, good, dtype, out) is None  # it would be written as if it were [8, 8], row by row
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # whose graphs hold torch's products
    assert matmuls._plan(good, good, dtype) is None


def test_backend_torch_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matmul", "addmm_"):
        monkeypatch.setattr(norms, name, lambda *_: pytest.fail("a matmul of ours"))
    x = torch.randn(3, 8, requires_grad=True)
    weights = [torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)]
    _, raws, _, _ = norm_linear(x, weights, eps=1e-6, backend="torch")
    torch.autograd.grad(raws[0].sum() + raws[1].sum(), [x, *weights])


@pytest.mark.parametrize("measured", [False, True])
def test_a_sum_apart_has_a_plan_on_every_gpu(monkeypatch: pytest.MonkeyPatch, measured: bool) -> None:
    """By the preferred algorithm where those were measured, else by the first that is offered, which torch takes."""
    monkeypatch.setattr(matmuls, "_measured", lambda device: measured)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cublaslt, "choose", lambda *arguments: arguments[-1])
    x, dtype = on_gpu(), torch.bfloat16
    assert matmuls._plan(x, x, dtype) is (preferred if measured else None)
    choice = matmuls._plan(x, x, dtype, x, apart=True)
    others, ours = [Algorithm(24, 7, 1), Algorithm(29, 3, 1)], matmuls.TILES_128_160
    sizes = of(65536, 1024, 1024)
    assert choice(*sizes, [*others, ours]) == (2 if measured else 0)  # type: ignore[operator]
    assert choice(*sizes, others) == 0 and choice(*sizes, []) is None  # type: ignore[operator]


def of(M: int, K: int, N: int, transposed: bool = False) -> tuple[Matrix, Matrix]:
    """[M, K] @ [K, N]; transposed: as a weight's gradient has them, else as a forward pass has them."""
    left = Matrix(K, M, M, True) if transposed else Matrix(M, K, K, False)
    return left, Matrix(K, N, N, False) if transposed else Matrix(N, K, K, True)


@pytest.mark.parametrize(
    ("shape", "transposed", "algorithm"),
    [
        ((65536, 1024, 5632), False, matmuls.TILES_176_128),
        ((49152, 2048, 6144), False, matmuls.TILES_176_128),
        ((4096, 1024, 32000), False, matmuls.TILES_176_128),
        ((65536, 1024, 3072), False, matmuls.TILES_128_160),  # 17.5 tiles of 176
        ((65536, 2816, 1024), False, matmuls.TILES_128_160),
        ((65536, 5632, 1024), False, None),  # a long sum
        ((512, 1024, 5632), False, None),  # few rows
        ((5632, 65536, 1024), True, matmuls.THIRDS_256_128),  # 176 tiles: 4 rounds of 132 in thirds
        ((3072, 65536, 1024), True, None),  # 96 tiles: 2.2 rounds
        ((5632, 16384, 1024), True, None),  # too short for thirds
        ((32000, 4096, 1024), True, matmuls.TILES_128_128),
    ],
)
def test_the_preferred_algorithm(shape: tuple[int, int, int], transposed: bool, algorithm: Algorithm | None) -> None:
    others = [Algorithm(24, 7, 1), Algorithm(29, 3, 1)]
    ours = [matmuls.TILES_128_128, matmuls.TILES_128_160, matmuls.THIRDS_256_128, matmuls.TILES_176_128]
    offered = [others[0], *ours, others[1]]
    left, right = of(*shape, transposed)
    index = preferred(left, right, offered)
    assert (None if index is None else offered[index]) == algorithm
    assert preferred(left, right, others) is None  # what is not offered is not taken


def test_the_next_best_where_one_is_not_offered() -> None:
    assert preferred(*of(65536, 1024, 5632), [Algorithm(24, 7, 1), matmuls.TILES_128_160]) == 1


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_linear_and_its_gradients(monkeypatch: pytest.MonkeyPatch, backend: str, wanted: tuple[bool, bool]) -> None:
    """Ours, which the interpreter's backend takes on a CPU, and torch's; frozen weights get no gradient."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 3, 8, generator=generator), torch.randn(5, 8, generator=generator)
    x.requires_grad_(wanted[0])
    weight.requires_grad_(wanted[1])
    dy = torch.randn(2, 3, 5, generator=generator)
    results = []
    for call in (lambda: linear(x, weight, backend=backend), lambda: F.linear(x, weight)):
        y = call()
        assert y.shape == (2, 3, 5) and not y._is_view()  # FSDP warns of views among a block's results
        results.append((y, *torch.autograd.grad(y, [z for z in (x, weight) if z.requires_grad], dy)))
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape and torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_the_ops_of_linear_are_well_formed(rows: int, wanted: tuple[bool, bool]) -> None:
    """Also of a gradient that lies expanded or transposed; empty is what nobody asks for."""
    x, weight = torch.randn(rows, 8), torch.randn(3, 8)
    leaves = [z.clone().requires_grad_(want) for z, want in zip((x, weight), wanted, strict=True)]
    torch.library.opcheck(linear_op.op, (*leaves, None, None))
    torch.library.opcheck(linear_op.op, (*leaves, torch.randn(rows, 3), torch.zeros(rows, 3, requires_grad=True)))
    for dy in (torch.randn(rows, 3), torch.randn(3, rows).t(), torch.ones(()).expand(rows, 3)):
        arguments = (dy, x, weight, *wanted)
        torch.library.opcheck(linear_op.backward_op, arguments, test_utils=("test_schema", "test_faketensor"))
        got = linear_op.backward_op(dy, x, weight, *wanted)
        for z, expected, want in zip(got, (dy @ weight, dy.t() @ x), wanted, strict=True):
            assert torch.allclose(z, expected) if want else z.numel() == 0


def test_linear_under_autocast_is_that_of_torch() -> None:
    x, weight = torch.ones(2, 8), torch.ones(3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight).dtype == torch.bfloat16


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"weight: expected torch.float32 \[O, I\] for x \[..., I\] of \[2, 5\]"):
        linear(torch.zeros(2, 5), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"got torch.float64 \[3, 5\]"):
        linear(torch.zeros(2, 5), torch.zeros(3, 5, dtype=torch.float64))
