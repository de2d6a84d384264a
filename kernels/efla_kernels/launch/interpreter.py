"""16-bit inputs under Triton's interpreter: up-cast, computed in fp32, cast back.

The interpreter keeps bf16 as raw 16-bit patterns and multiplies those as integers, so that a bf16 product is garbage
without an error. Nothing of 16 bits reaches it: the backend that is registered under TRITON_INTERPRET=1 is this one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # for kernels: there is no inline assembly then

_NARROW = (torch.bfloat16, torch.float16)


def _wide(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.dtype in _NARROW else x


def _upcast(op: Callable[..., tuple[Tensor, Tensor | None]], values: int) -> Callable[..., Any]:
    """`op` with its tensors up-cast and its output in the type of input number `values`."""

    def run(*inputs, initial_state, **options):
        o, state = op(*map(_wide, inputs), initial_state=_wide(initial_state), **options)
        return o.to(inputs[values].dtype), state

    return run


def upcasting_backend(backend: Any) -> SimpleNamespace:
    """`backend` with 16-bit inputs of its ops in fp32."""
    delta = ("delta_rule", "deltanet", "efla", "gated_deltanet", "gated_efla")
    ops = {name: _upcast(getattr(backend, name), 2) for name in delta}
    ops |= {name: _upcast(getattr(backend, name), 0) for name in ("ssd", "mamba2")}

    def mamba2_step(*inputs):
        return backend.mamba2_step(*map(_wide, inputs)).to(inputs[0].dtype)

    return SimpleNamespace(**ops, mamba2_step=mamba2_step)
