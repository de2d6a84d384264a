"""The second half of a SwiGLU MLP: the gated activation and the product that takes it back to the residual stream."""

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
    onto: Tensor | Stream | None = None,
    backend: str = "auto",
) -> Tensor:
    """y = (silu(r gate) * (r up)) W^T, or h + y for h = onto, of gate_up [..., 2F] = (gate, up) and W [D, F].

    r is row_scale [...], fp32 or fp64, one factor for each row, 1 without: that of an RMS norm whose product was taken
    of the rows as they were. It counts as a constant and gets no gradient; gate_up's has the factor in it. One dtype
    for gate_up, W and h, which is the result's [..., D], under autocast too; a `Stream` is added as the product is
    written, a tensor behind it. The kernels, where `layer_backend` chooses them, compute the activation of 16-bit
    inputs in fp32 and keep their inputs alone for the backward pass.
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
    if isinstance(onto, Tensor):
        return onto + swiglu_linear(gate_up, weight, row_scale=row_scale, backend=backend)
    if onto is not None:
        onto.check(gate_up, weight.shape[0])
    with torch.autocast(gate_up.device.type, enabled=False):  # the product has its operands' dtype, forward and back
        if layer_backend(backend, gate_up) == "torch" or gate_up.numel() == 0:
            if row_scale is not None:
                gate_up = gate_up * row_scale.detach()[..., None]  # 16 bits become fp32
            gate, up = gate_up.chunk(2, -1)
            y = F.linear((F.silu(gate) * up).to(weight.dtype), weight)
            return y if onto is None else onto.plus(y)
        from efla_kernels.layers.swiglu_kernels import project  # triton is there wherever it is chosen

        rows = gate_up.reshape(-1, gate_up.shape[-1])
        factors = None if row_scale is None else row_scale.reshape(-1).float()
        stream = (None, None) if onto is None else onto.rows()
        if gate_up.is_cuda:
            y = project(rows, weight, factors, *stream)
        else:  # the interpreter rounds to 16 bits by truncation: nothing of 16 bits reaches it
            wide = (None if t is None else t.float() for t in stream)
            y = project(rows.float(), weight.float(), factors, *wide).to(gate_up.dtype)
        return torch.ops.aten._unsafe_view(y, [*gate_up.shape[:-1], weight.shape[0]])  # see `linear`
