"""Launches without Triton's binder: what a kernel was compiled for is looked up by a short key of our own.

`kernel[grid](...)` binds, types and hashes every argument and every constant anew, which costs the host more than the
device needs for a short kernel. Here the first call with a key goes that way and its compiled kernel is kept; later
ones start it at once. The key holds all that Triton specialises on: types, whether pointers and integers are multiples
of 16, whether an integer is 1, and the constants. tests/kernels/test_dispatch.py asks Triton itself whether it does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any, programs: int, *arguments: Any, num_warps: int, num_stages: int = 3, registers: int = 0,
    **constants: Any,
) -> None:  # fmt: skip
    """Run a @triton.jit function over a grid of `programs`.

    arguments are its run-time arguments by position, all of them before the constants in its signature; tensors among
    them are on the current device. num_stages is Triton's own default; registers is the most that a thread may have on
    an NVIDIA GPU (0: the compiler's choice).
    """
    kinds, values = specialise(arguments)
    # by the kernel's Python function: a JITFunction hashes its source's digest, under a lock
    key = (kernel.fn, num_warps, num_stages, registers, *constants, *constants.values(), *kinds)
    found = _compiled.get(key)
    if found is not None:
        compiled, trailing = found
        compiled[programs, 1, 1](*values, *trailing)
        return
    limit = {"maxnreg": registers} if registers and torch.version.cuda else {}
    compiled = kernel[(programs,)](*arguments, num_warps=num_warps, num_stages=num_stages, **limit, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def specialise(arguments: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """What Triton makes a difference by in run-time arguments, and the arguments as a compiled kernel takes them.

    Tensors become their addresses: the launcher then does not ask the driver for each whether the GPU can read it,
    which the devices in the key say.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            kinds += argument.dtype, argument.get_device(), address % 16 == 0
            values.append(address)
        else:
            kinds.append(_kind(argument))
            values.append(argument)
    return kinds, values


@functools.lru_cache(maxsize=4096, typed=True)
def _kind(number: Any) -> Any:
    if isinstance(number, int):
        return type(number), number == 1, number % 16 == 0, -(2**31) <= number < 2**31, number < 2**63
    return type(number)
