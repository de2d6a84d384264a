"""Token-by-token recurrences: the definition that every faster form is tested against.

Delta rule:  S_t = exp(log_decay_t) (I - e_t k_t k_t^T) S_{t-1} + w_t k_t v_t^T,   o_t = scale S_t^T q_t
SSD:         S_t = exp(log_decay_t) S_{t-1} + dt_t B_t x_t^T,                     y_t = S_t^T C_t

They run in float64 for float64 inputs and in float32 otherwise, and autograd differentiates them. This module is the
backend "reference": its functions take what the public ops hand to a backend (checked arguments).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from efla_kernels.argument_checks import compute_dtype, segment_offsets


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    erase: Tensor,
    write: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The delta rule by its definition; arguments and results as `efla_kernels.delta_rule`."""
    dtype = compute_dtype(q, k, v, erase, write, log_decay, initial_state)
    q_, k_, v_, e_, w_ = (x.to(dtype) for x in (q, k, v, erase, write))
    q_ = q_ * scale
    decay_ = None if log_decay is None else log_decay.to(dtype)
    state_shape = (q.shape[2], q.shape[3], v.shape[3])
    outputs, finals = [], []
    for rows, first, last, state in _sequences(q, state_shape, dtype, initial_state, cu_seqlens):
        for t in range(first, last):
            decay = None if decay_ is None else decay_[rows, t]
            o, state = delta_step(state, q_[rows, t], k_[rows, t], v_[rows, t], e_[rows, t], w_[rows, t], decay)
            outputs.append(o)
        finals.append(state)
    out = torch.stack(outputs, 1) if outputs else v_
    return out.to(v.dtype), torch.cat(finals) if output_final_state else None


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
    for rows, first, last, state in _sequences(x, state_shape, dtype, initial_state, cu_seqlens):
        for t in range(first, last):
            y, state = ssd_step(state, x_[rows, t], dt_[rows, t], decay_[rows, t], B_[rows, t], C_[rows, t])
            outputs.append(y)
        finals.append(state)
    out = torch.stack(outputs, 1) if outputs else x_
    return out.to(x.dtype), torch.cat(finals) if output_final_state else None


def _sequences(
    x: Tensor,
    state_shape: tuple[int, int, int],
    dtype: torch.dtype,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[tuple[slice, int, int, Tensor]]:
    """(batch rows, first token, end token, initial state) of what runs together: the whole batch, or each segment."""
    batch, tokens = x.shape[:2]
    bounds = [0, tokens] if cu_seqlens is None else segment_offsets(cu_seqlens, tokens)
    sequences = batch if cu_seqlens is None else len(bounds) - 1
    if initial_state is None:
        states = torch.zeros(sequences, *state_shape, dtype=dtype, device=x.device)
    else:
        states = initial_state.to(dtype)
    per_run = batch if cu_seqlens is None else 1
    return [
        (slice(0, batch), first, last, states[n * per_run : (n + 1) * per_run])
        for n, (first, last) in enumerate(pairwise(bounds))
    ]
