"""The gated activation of an MLP, silu(gate) * up, of gate and up side by side."""

from __future__ import annotations

import os

import torch.nn.functional as F
from torch import Tensor

from efla_kernels.backends import is_registered
from efla_kernels.convolution import DTYPES


def swiglu(gate_up: Tensor, *, backend: str = "auto") -> Tensor:
    """y = silu(gate) * up of gate_up [..., 2F] = (gate, up); returns [..., F] in its dtype.

    Computed in fp32 for 16-bit inputs by the kernels, which "torch" and "reference" leave out. All other names of
    `backend` mean them on CUDA (or interpreted, for "triton"); anywhere else PyTorch does it.
    Raises ValueError for an odd last dimension or a dtype that is not floating point.
    """
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2 or not gate_up.is_floating_point():
        raise ValueError(
            f"gate_up: expected a floating point tensor [..., 2F], got {gate_up.dtype} {list(gate_up.shape)}"
        )
    on_device = gate_up.is_cuda or (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1")
    served = on_device and gate_up.dtype in DTYPES and gate_up.numel() > 0 and is_registered("triton")
    if backend in ("torch", "reference") or not served:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
    from efla_kernels.triton.swiglu import activate  # triton is there wherever it is chosen

    rows = gate_up.reshape(-1, gate_up.shape[-1])
    # the interpreter rounds to 16 bits by truncation: nothing of 16 bits reaches it
    y = activate(rows) if gate_up.is_cuda else activate(rows.float()).to(gate_up.dtype)
    return y.view(*gate_up.shape[:-1], -1)
