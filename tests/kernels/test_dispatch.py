"""Launches by our own key: it tells apart whatever Triton compiles apart, and a known key starts the right kernel."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from efla_kernels.launch import dispatch
from efla_kernels.launch.arguments import power_of_two
from torch import Tensor
from triton import next_power_of_2
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

TENSORS = [
    torch.zeros(9, dtype=dtype)[start:]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool)
    for start in (0, 1)
]
INTEGERS = [0, 1, 2, 15, 16, 17, 48, -16, -1, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 1, 2**63, 2**63 + 1]
ARGUMENTS: list[Any] = [*TENSORS, torch.empty(0), *INTEGERS, True, False, 0.0, 1.0, 0.5]


class Elsewhere(Tensor):
    """A tensor that says it is on the second GPU."""

    def get_device(self) -> int:
        return 1


def kinds(*arguments: Any) -> list[Any]:
    return dispatch.specialise(arguments)[0]


def by_triton(argument: Any) -> Any:
    return native_specialize_impl(CUDABackend, argument, False, True, True)


def test_what_triton_compiles_apart_has_another_key() -> None:
    for a, b in product(ARGUMENTS, ARGUMENTS):
        if by_triton(a) != by_triton(b):
            assert kinds(a) != kinds(b), (a, b)
    assert kinds(TENSORS[0]) != kinds(TENSORS[0].as_subclass(Elsewhere))


def test_lengths_and_places_share_keys() -> None:
    """What Triton compiles once is looked up as one: no kernel for every length, none for every allocation."""
    assert kinds(48) == kinds(64) and kinds(17) == kinds(2047) and kinds(0.5) == kinds(1.0)
    assert kinds(torch.zeros(3, 5)) == kinds(torch.zeros(7))


def test_keys_of_arguments_do_not_run_into_each_other() -> None:
    some = [TENSORS[0], TENSORS[1], TENSORS[2], 1, 16, 17, 0.5]
    rows = [row for n in (1, 2, 3) for row in product(some, repeat=n)]
    assert len({tuple(kinds(*row)) for row in rows}) == len(rows)


class Kernel:
    """Stands in for a @triton.jit function, and for what it compiles to: notes how it is called."""

    arg_names = ("x", "y", "T", "BLOCK", "WIDE")

    def __init__(self) -> None:
        self.fn = object()
        self.compiled: list[tuple[Any, ...]] = []
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*arguments: Any, **options: Any) -> Any:
            self.compiled.append((grid, arguments, options))
            return Compiled(self, len(self.compiled))

        return compile_and_run


class Compiled:
    def __init__(self, kernel: Kernel, number: int) -> None:
        self.kernel, self.number = kernel, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.kernel.started.append((self.number, grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(dispatch, "_compiled", {})
    return Kernel()


def test_a_known_key_starts_what_it_was_compiled_to(kernel: Kernel) -> None:
    x, y = torch.zeros(8), torch.zeros(8)
    # constants in another order than the signature's
    dispatch.launch(kernel, 3, x, y, 17, WIDE=True, BLOCK=16, num_warps=4)
    dispatch.launch(kernel, 3, x, y, 16, WIDE=True, BLOCK=16, num_warps=4)
    assert [call[0] for call in kernel.compiled] == [(3,), (3,)] and not kernel.started
    assert kernel.compiled[0][1][0] is x
    dispatch.launch(kernel, 5, y, x, 18, WIDE=True, BLOCK=16, num_warps=4)
    dispatch.launch(kernel, 6, x, x, 32, WIDE=True, BLOCK=16, num_warps=4)
    assert kernel.started == [
        (1, (5, 1, 1), (y.data_ptr(), x.data_ptr(), 18, 16, True)),
        (2, (6, 1, 1), (x.data_ptr(), x.data_ptr(), 32, 16, True)),
    ]


def test_every_option_and_constant_is_part_of_the_key(kernel: Kernel) -> None:
    x = torch.zeros(8)
    calls: list[dict[str, Any]] = [
        {"BLOCK": 16, "WIDE": 32, "num_warps": 4},
        {"BLOCK": 32, "WIDE": 16, "num_warps": 4},
        {"WIDE": 16, "BLOCK": 32, "num_warps": 4, "num_stages": 2},
        {"WIDE": 32, "BLOCK": 16, "num_warps": 8},
        {"BLOCK": 16, "WIDE": 32, "num_warps": 4, "registers": 128},
    ]
    # the same values under each other's names: 16 and 32 in this order, but WIDE is 16
    calls.append({"WIDE": 16, "BLOCK": 32, "num_warps": 4})
    for options in calls:
        dispatch.launch(kernel, 1, x, x, 17, **options)
    other = Kernel()
    dispatch.launch(other, 1, x, x, 17, **calls[0])
    assert len(kernel.compiled) == len(calls) and len(other.compiled) == 1
    assert not kernel.started and not other.started


def test_powers_of_two_are_tritons() -> None:
    assert all(power_of_two(n) == next_power_of_2(n) for n in [*range(1, 300), 2**20, 2**20 + 1])
