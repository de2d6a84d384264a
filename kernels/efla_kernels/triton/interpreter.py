"""16-bit inputs under Triton's interpreter: up-cast, computed in fp32, cast back.

The interpreter keeps bf16 as raw 16-bit patterns and multiplies those as integers, so that a bf16 product is garbage
without an error. Nothing of 16 bits reaches it: the backend that is registered under TRITON_INTERPRET=1 is this one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)


def _wide(x: Tensor | None) -> Tensor | None:
    return x.float() if x is not None and x.dtype in _NARROW else x


def _upcast(op: Callable[..., tuple[Tensor, Tensor | None]]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def run(q, k, v, *gates, scale, initial_state, output_final_state, cu_seqlens):
        o, state = op(
            *map(_wide, (q, k, v, *gates)), scale=scale, initial_state=_wide(initial_state),
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return o.to(v.dtype), state

    return run


def upcasting_backend(backend: Any) -> SimpleNamespace:
    """`backend` with 16-bit inputs of its delta-rule ops in fp32."""
    names = ("delta_rule", "deltanet", "efla", "gated_deltanet", "gated_efla")
    return SimpleNamespace(**{name: _upcast(getattr(backend, name)) for name in names})
