"""State-space duality token by token: the definition that every faster form is tested against.

    S_t = exp(log_decay_t) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t

It runs in float64 for float64 inputs and in float32 otherwise, and autograd differentiates it. This module is the
backend "reference": its function takes what the public ops hand to a backend (checked arguments).
"""

from __future__ import annotations

import torch
from torch import Tensor

from efla_kernels.argument_checks import compute_dtype
from efla_kernels.launch.chunks import whole_sequences


def ssd_step(state: Tensor, x: Tensor, dt: Tensor, log_decay: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """One token: state [..., N, P], x [..., P], dt and log_decay [...], B and C [..., N] -> (y [..., P], state)."""
    state = state * torch.exp(log_decay)[..., None, None] + B.unsqueeze(-1) * (dt.unsqueeze(-1) * x).unsqueeze(-2)
    return (C.unsqueeze(-2) @ state).squeeze(-2), state


def ssd(
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """State-space duality by its definition; arguments and results as `efla_kernels.ssd`."""
    dtype = compute_dtype(x, dt, log_decay, B, C, initial_state)
    heads_per_group = x.shape[2] // B.shape[2]
    x_, dt_, decay_ = (t.to(dtype) for t in (x, dt, log_decay))
    B_, C_ = (t.to(dtype).repeat_interleave(heads_per_group, 2) for t in (B, C))
    outputs, finals = [], []
    state_shape = (x.shape[2], B.shape[3], x.shape[3])
    for rows, first, last, state in whole_sequences(x, state_shape, dtype, initial_state, cu_seqlens):
        for t in range(first, last):
            y, state = ssd_step(state, x_[rows, t], dt_[rows, t], decay_[rows, t], B_[rows, t], C_[rows, t])
            outputs.append(y)
        finals.append(state)
    out = torch.stack(outputs, 1) if outputs else x_
    return out.to(x.dtype), torch.cat(finals) if output_final_state else None
