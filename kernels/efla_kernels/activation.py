"""The second half of a SwiGLU MLP: the gated activation and the product that takes it back to the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.backends import layer_backend


def swiglu_linear(gate_up: Tensor, weight: Tensor, *, backend: str = "auto") -> Tensor:
    """y = (silu(gate) * up) W^T of gate_up [..., 2F] = (gate, up) and W [D, F]; returns [..., D].

    One dtype for both, which is the result's, under autocast too. The kernels, where `layer_backend` chooses them,
    compute the activation of 16-bit inputs in fp32 and keep gate_up and W alone for the backward pass.
    Raises ValueError for dtypes that differ or are not floating point, or for shapes that do not fit.
    """
    if gate_up.dim() < 1 or gate_up.shape[-1] % 2 or not gate_up.is_floating_point():
        raise ValueError(
            f"gate_up: expected a floating point tensor [..., 2F], got {gate_up.dtype} {list(gate_up.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] * 2 != gate_up.shape[-1] or weight.dtype != gate_up.dtype:
        raise ValueError(
            f"weight: expected {gate_up.dtype} [D, {gate_up.shape[-1] // 2}], got {weight.dtype} {list(weight.shape)}"
        )
    with torch.autocast(gate_up.device.type, enabled=False):  # the product has its operands' dtype, forward and back
        if layer_backend(backend, gate_up) == "torch" or gate_up.numel() == 0:
            gate, up = gate_up.chunk(2, -1)
            return F.linear(F.silu(gate) * up, weight)
        from efla_kernels.triton.swiglu import project  # triton is there wherever it is chosen

        rows = gate_up.reshape(-1, gate_up.shape[-1])
        # the interpreter rounds to 16 bits by truncation: nothing of 16 bits reaches it
        y = project(rows, weight) if gate_up.is_cuda else project(rows.float(), weight.float()).to(gate_up.dtype)
        return y.view(*gate_up.shape[:-1], -1)
