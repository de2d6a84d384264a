"""The gated activation of an MLP, silu(gate) * up, of gate and up side by side."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from efla_kernels.backends import layer_backend


def swiglu(gate_up: Tensor, *, backend: str = "auto") -> Tensor:
    """y = silu(gate) * up of gate_up [..., 2F] = (gate, up); returns [..., F] in its dtype.

    The kernels, where `layer_backend` chooses them, compute 16-bit inputs in fp32.
    Raises ValueError for an odd last dimension or a dtype that is not floating point.
    """
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2 or not gate_up.is_floating_point():
        raise ValueError(
            f"gate_up: expected a floating point tensor [..., 2F], got {gate_up.dtype} {list(gate_up.shape)}"
        )
    if layer_backend(backend, gate_up) == "torch" or gate_up.numel() == 0:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up
    from efla_kernels.triton.swiglu import activate  # triton is there wherever it is chosen

    rows = gate_up.reshape(-1, gate_up.shape[-1])
    # the interpreter rounds to 16 bits by truncation: nothing of 16 bits reaches it
    y = activate(rows) if gate_up.is_cuda else activate(rows.float()).to(gate_up.dtype)
    return y.view(*gate_up.shape[:-1], -1)
