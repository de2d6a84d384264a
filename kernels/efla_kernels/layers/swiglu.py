"""The second half of a SwiGLU MLP: the gated activation, the down projection, and the sum with the residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.backends import layer_backend
from efla_kernels.layers.residual import Stream

SCALE_DTYPES = (torch.float32, torch.float64)


def swiglu_linear(
    gate_up: Tensor,
    weight: Tensor,
    *,
    row_scale: Tensor | None = None,
    residual: Tensor | Stream | None = None,
    backend: str = "auto",
) -> Tensor:
    """y = (silu(r gate) * (r up)) W^T, or h + y for h = residual; gate_up [..., 2F] = (gate, up), W [D, F], y [..., D].

    Args:
        gate_up, weight: of one dtype, which is y's and h's too, also under autocast.
        row_scale: r [...], fp32 or fp64, one factor per row; 1 by default. See `norm_linear`. It gets no gradient;
            gate_up's gradient contains it.
        residual: a `Stream` is added by the matmul itself, a tensor after it.
        backend: see `layer_backend`. The kernels compute the activation of 16-bit inputs in fp32, and keep only their
            inputs for the backward pass.

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
    if row_scale is not None and (row_scale.shape != gate_up.shape[:-1] or row_scale.dtype not in SCALE_DTYPES):
        raise ValueError(
            f"row_scale: expected torch.float32 {list(gate_up.shape[:-1])}, one factor for each row of gate_up, got "
            f"{row_scale.dtype} {list(row_scale.shape)}"
        )
    if isinstance(residual, Tensor):
        return residual + swiglu_linear(gate_up, weight, row_scale=row_scale, backend=backend)
    if residual is not None:
        residual.check(gate_up, weight.shape[0])
    with torch.autocast(gate_up.device.type, enabled=False):  # matmuls have their operands' dtype, forward and back
        if layer_backend(backend, gate_up) == "torch" or gate_up.numel() == 0:
            if row_scale is not None:
                gate_up = gate_up * row_scale.detach()[..., None]  # 16 bits become fp32
            gate, up = gate_up.chunk(2, -1)
            y = F.linear((F.silu(gate) * up).to(weight.dtype), weight)
            return y if residual is None else residual.add(y)
        from efla_kernels.layers.swiglu_kernels import Inputs, swiglu_op  # Triton is installed wherever it is chosen

        rows = gate_up.reshape(-1, gate_up.shape[-1])
        scale = None if row_scale is None else row_scale.reshape(-1).float()
        stream = (None, None) if residual is None else residual.rows()
        if gate_up.is_cuda:
            y = swiglu_op(Inputs(rows, weight, scale, *stream))
        else:  # Triton's interpreter truncates when it rounds to 16 bits, so it gets fp32
            wide = (None if t is None else t.float() for t in stream)
            y = swiglu_op(Inputs(rows.float(), weight.float(), scale, *wide)).to(gate_up.dtype)
        return torch.ops.aten._unsafe_view(y, [*gate_up.shape[:-1], weight.shape[0]])  # see `linear`
