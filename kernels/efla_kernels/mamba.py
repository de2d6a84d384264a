"""Public ops of Mamba-2: state-space duality (`ssd`) and the selective state space layer's core (`mamba2`).

    S_t = exp(log_decay_t) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t + D x_t
    dt = softplus(dt_raw + dt_bias),  log_decay = -exp(A_log) dt

H heads of width P, state width N, G groups that share B and C among H / G heads each (group of head h: h // (H / G)).
Keywords as in `efla_kernels.ops`; the state is [sequences, H, N, P].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.backends import get_backend
from efla_kernels.checks import compute_dtype, count_sequences, expect_4d, expect_shape, expect_state


def ssd(
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(log_decay_t) S_{t-1} + dt_t B_t x_t^T,  y_t = S_t^T C_t; returns (y [B, T, H, P] in x's dtype, state).

    x [B, T, H, P]; dt (step lengths, >= 0) and log_decay (<= 0) [B, T, H]; B and C [B, T, G, N]. Raises ValueError.
    """
    _check(x, dt, B, C, initial_state, cu_seqlens)
    expect_shape("log_decay", log_decay, tuple(x.shape[:3]), "[B, T, H]")
    implementation = get_backend(backend, x.device, "ssd")
    with torch.autocast(x.device.type, enabled=False):
        return implementation.ssd(
            x,
            dt,
            log_decay,
            B,
            C,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )


def mamba2(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    *,
    dt_mask: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Mamba-2's core with raw steps: softplus, decay, `ssd` and the skip D x; returns (y [B, T, H, P], state).

    x [B, T, H, P]; dt [B, T, H] before softplus; A_log, D, dt_bias [H]; B and C [B, T, G, N]. dt_mask [B, T] multiplies
    softplus(dt + dt_bias): a 0 makes a token that neither writes nor decays, which is what padding needs.
    Raises ValueError.
    """
    _check(x, dt, B, C, initial_state, cu_seqlens)
    for name, parameter in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        expect_shape(name, parameter, (x.shape[2],), "[H]")
    if dt_mask is not None and dt_mask.shape != x.shape[:2]:
        raise ValueError(f"dt_mask: expected shape {list(x.shape[:2])} = [B, T], got {list(dt_mask.shape)}")
    implementation = get_backend(backend, x.device, "mamba2")
    options = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
    }
    with torch.autocast(x.device.type, enabled=False):
        fused = getattr(implementation, "mamba2", None)
        if fused is not None:
            return fused(x, dt, A_log, B, C, D, dt_bias, dt_mask=dt_mask, **options)
        dtype = compute_dtype(x, dt, A_log, B, C, D, dt_bias, initial_state)
        step = F.softplus(dt.to(dtype) + dt_bias.to(dtype))
        if dt_mask is not None:
            step = step * dt_mask.to(dtype).unsqueeze(-1)
        log_decay = -torch.exp(A_log.to(dtype)) * step
        wide = x.to(dtype)
        y, state = implementation.ssd(wide, step, log_decay, B, C, **options)
        return (y + D.to(dtype).unsqueeze(-1) * wide).to(x.dtype), state


def _check(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    expect_4d("x", x, "[B, T, H, P]")
    batch, tokens, heads, width = x.shape
    expect_shape("dt", dt, (batch, tokens, heads), "[B, T, H]")
    expect_4d("B", B, "[B, T, G, N]")
    groups, state_width = B.shape[2:]
    expect_shape("B", B, (batch, tokens, groups, state_width), "[B, T, G, N] with x's B and T")
    expect_shape("C", C, (batch, tokens, groups, state_width), "[B, T, G, N] as B")
    if groups == 0 or heads % groups:
        raise ValueError(f"B: expected a number of groups G that divides H={heads}, got G={groups}")
    sequences = count_sequences(batch, cu_seqlens)
    expect_state(initial_state, cu_seqlens, (sequences, heads, state_width, width), "[N, H, state width, P]")
