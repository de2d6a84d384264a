"""Launches without Triton's binder: what a kernel was compiled for is looked up by a short key of our own.

`kernel[grid](...)` binds, types and hashes every argument and every constant anew, which costs the host more than the
device needs for a short kernel. Here the first call with a key goes that way and its compiled kernel is kept; later
ones start it at once. The key holds all that Triton specialises on: types, whether pointers and integers are multiples
of 16, whether an integer is 1, and the constants.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    programs: int,
    *arguments: Any,
    num_warps: int,
    num_stages: int = 3,
    registers: int = 0,
    **constants: Any,
) -> None:
    """Run a @triton.jit function over a grid of `programs`.

    arguments are its run-time arguments by position, all of them before the constants in its signature; tensors among
    them are on the current device. num_stages is Triton's own default; registers is the most that a thread may have on
    an NVIDIA GPU (0: the compiler's choice).
    """
    key = (kernel, num_warps, num_stages, registers, *constants.values(), *map(_kind, arguments))
    found = _compiled.get(key)
    if found is not None:
        compiled, trailing = found
        compiled[programs, 1, 1](*arguments, *trailing)
        return
    limit = {"maxnreg": registers} if registers and torch.version.cuda else {}
    compiled = kernel[(programs,)](*arguments, num_warps=num_warps, num_stages=num_stages, **limit, **constants)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _kind(argument: Any) -> Any:
    """What Triton makes a difference by in a run-time argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0, argument.get_device()
    if isinstance(argument, int):
        return argument % 16 == 0, argument == 1, abs(argument) < 2**31
    return type(argument)
