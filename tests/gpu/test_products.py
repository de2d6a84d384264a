"""Products by an algorithm of our choice, against float64."""

from __future__ import annotations

import pytest
import torch
from efla_kernels import linear, linear_cross_entropy
from efla_kernels.layers.tuned_matmul import cublaslt
from efla_kernels.layers.tuned_matmul import matmul as matmuls
from efla_kernels.layers.tuned_matmul.matmul import addmm, addmm_, matmul
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

# M, N, K; the last ones are what no algorithm of tensor copies takes: rows that 16 bytes do not measure
SHAPES = [(8192, 1024, 1024), (1000, 136, 264), (4096, 3072, 5632), (1024, 2816, 16384), (8, 8, 8), (77, 33, 19)]


def operand(rows: int, columns: int, transposed: bool, wider: int = 0) -> Tensor:
    """[rows, columns] with numbers of a unit, as it lies or transposed; wider: of a wider matrix."""
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.randn(shape[0], shape[1] + wider, device="cuda").bfloat16()[:, : shape[1]]
    return x.t() if transposed else x


def error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    M, N, K = shape
    a, b = operand(M, K, transposed[0]), operand(K, N, transposed[1], wider=256)
    expected = a.double() @ b.double()
    got = matmul(a, b)
    assert got.dtype == torch.bfloat16 and got.is_contiguous() and error(got, expected) < 2.5e-3
    assert torch.equal(got, matmul(a, b))
    wide = torch.empty(M, N, device="cuda")
    bound = max(1e-5, 1.2e-9 * K)  # the tensor cores' sums truncate
    assert matmul(a, b, out=wide) is wide and error(wide, expected) < bound
    addmm_(wide, a, b)
    assert error(wide, 2 * expected) < bound
    addmm_(got, a, b)
    assert error(got, 2 * expected) < 4e-3
    x, before = got, got.clone()
    assert error(addmm(x, a, b), x.double() + expected) < 2.5e-3 and torch.equal(x, before)


@pytest.mark.skipif(torch.cuda.is_available() and not matmuls._measured(0), reason="other algorithms there")
@pytest.mark.parametrize(
    ("left", "right", "algorithm"),
    [
        ((65536, 1024, False), (1024, 5632, True), matmuls.TILES_176_128),
        ((16384, 1024, False), (1024, 3072, True), matmuls.TILES_128_160),
        ((65536, 1024, False), (1024, 2816, False), matmuls.TILES_128_160),
        ((5632, 65536, True), (65536, 1024, False), matmuls.THIRDS_256_128),
        ((32000, 4096, True), (4096, 1024, False), matmuls.TILES_128_128),
    ],
)
def test_an_algorithm_of_ours_runs(
    left: tuple[int, int, bool], right: tuple[int, int, bool], algorithm: cublaslt.Algorithm
) -> None:
    """What `preferred` names is offered, for products of a 340M model: no choice of torch's in silence."""
    a, b = operand(*left), operand(*right)
    dtype = torch.float32 if left[0] == 32000 else torch.bfloat16
    plan = matmuls._plan(a, b, dtype)
    assert plan is not None and plan.algorithm == algorithm
    out = torch.empty(left[0], right[1], device="cuda", dtype=dtype)
    assert error(matmul(a, b, out=out), a.double() @ b.double()) < (3e-5 if dtype == torch.float32 else 2.5e-3)


@pytest.mark.parametrize("shape", [(65536, 1024, 1024), (65536, 2816, 1024), (49152, 5632, 2048), (64, 1024, 1024)])
def test_a_sum_is_not_copied_first(shape: tuple[int, int, int]) -> None:
    """What is added to is read where it lies, also by the algorithm that torch chooses; nothing else is allocated but
    the result and what the algorithm itself wants."""
    M, K, N = shape
    a, b, x = operand(M, K, False), operand(K, N, True), operand(M, N, False)
    plan = matmuls._plan(a, b, torch.bfloat16, x, apart=True)
    assert plan is not None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = addmm(x, a, b)
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + plan.found.workspace + 1024
    assert error(y, x.double() + a.double() @ b.double()) < 2.5e-3


def test_operands_that_are_not_multiplied() -> None:
    """Empty ones give zeros; of another type or place torch says so, and nothing is read as what it is not."""
    x, weight = operand(4096, 1024, False), operand(1024, 1024, False)
    assert matmul(x[:0], weight).shape == (0, 1024)
    assert torch.equal(matmul(x[:, :0], weight[:0]), torch.zeros_like(x))
    for bad in (weight.float(), weight.half(), weight.cpu()):
        with pytest.raises(RuntimeError):
            matmul(x, bad)
    for bad in (x.float(), x.cpu(), x[:8]):
        with pytest.raises(RuntimeError):
            addmm(bad, x, weight)
    with pytest.raises(RuntimeError):
        linear_cross_entropy(x, weight.float(), torch.zeros(4096, dtype=torch.int64, device="cuda"))


def test_results_and_operands_off_the_alignment() -> None:
    room = torch.empty(8192 * 1024 + 8, device="cuda", dtype=torch.bfloat16)
    x, weight = operand(8192, 1024, False), operand(1024, 1024, False)
    expected = x.double() @ weight.double()
    for first in (0, 1, 8):
        out = room[first : first + 8192 * 1024].view(8192, 1024)
        assert error(matmul(x, weight, out=out), expected) < 2.5e-3
        assert error(matmul(out.copy_(x), weight), expected) < 2.5e-3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_a_device_that_is_not_the_current_one() -> None:
    x, weight = operand(8192, 1024, False).to("cuda:1"), operand(1024, 1024, False).to("cuda:1")
    got = matmul(x, weight)
    assert got.device == x.device and error(got, x.double() @ weight.double()) < 2.5e-3
    with torch.cuda.device(1):
        assert error(matmul(x, weight), x.double() @ weight.double()) < 2.5e-3


def test_in_a_graph() -> None:
    x, weight = operand(8192, 1024, False), operand(1024, 1024, False)
    expected = matmul(x, weight.t())
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        matmul(x, weight.t(), out=out)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_and_its_gradients(compiled: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 512, 1024, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(2048, 1024, device="cuda") / 32).bfloat16().requires_grad_()
    dy = torch.randn(4, 512, 2048, device="cuda").bfloat16()
    y = (torch.compile(linear, fullgraph=True) if compiled else linear)(x, weight)
    got = (y, *torch.autograd.grad(y, (x, weight), dy))
    leaves = [z.detach().double().requires_grad_() for z in (x, weight)]
    truth = leaves[0] @ leaves[1].t()
    for z, expected in zip(got, (truth, *torch.autograd.grad(truth, leaves, dy.double())), strict=True):
        assert z.dtype == torch.bfloat16 and z.shape == expected.shape and error(z, expected.detach()) < 2.5e-3
