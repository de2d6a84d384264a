"""The delta rule token by token: the definition that every faster form is tested against.

    S_t = exp(log_decay_t) (I - e_t k_t k_t^T) S_{t-1} + w_t k_t v_t^T,   o_t = scale S_t^T q_t

It runs in float64 for float64 inputs and in float32 otherwise, and autograd differentiates it. This module is the
backend "reference": its function takes what the public ops hand to a backend (checked arguments).
"""

from __future__ import annotations

import torch
from torch import Tensor

from efla_kernels.argument_checks import compute_dtype
from efla_kernels.launch.chunks import whole_sequences


def delta_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token: state [..., K, V]; q, k [..., K]; v [..., V]; erase, write, log_decay [...] -> (o [..., V], state)."""
    if log_decay is not None:
        state = state * torch.exp(log_decay)[..., None, None]
    read = (k.unsqueeze(-2) @ state).squeeze(-2)
    update = write.unsqueeze(-1) * v - erase.unsqueeze(-1) * read
    state = state + k.unsqueeze(-1) * update.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, log_decay: Tensor | None, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The delta rule by its definition; arguments and results as `efla_kernels.delta_rule`."""
    dtype = compute_dtype(q, k, v, erase, write, log_decay, initial_state)
    q_, k_, v_, e_, w_ = (x.to(dtype) for x in (q, k, v, erase, write))
    q_ = q_ * scale
    decay_ = None if log_decay is None else log_decay.to(dtype)
    state_shape = (q.shape[2], q.shape[3], v.shape[3])
    outputs, finals = [], []
    for rows, first, last, state in whole_sequences(q, state_shape, dtype, initial_state, cu_seqlens):
        for t in range(first, last):
            decay = None if decay_ is None else decay_[rows, t]
            o, state = delta_step(state, q_[rows, t], k_[rows, t], v_[rows, t], e_[rows, t], w_[rows, t], decay)
            outputs.append(o)
        finals.append(state)
    out = torch.stack(outputs, 1) if outputs else v_
    return out.to(v.dtype), torch.cat(finals) if output_final_state else None
