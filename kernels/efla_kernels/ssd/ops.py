"""Public ops of Mamba-2: state-space duality (`ssd`) and the selective state space layer's core (`mamba2`).

    S_t = exp(log_decay_t) S_{t-1} + dt_t B_t x_t^T,   y_t = S_t^T C_t + D x_t
    dt = softplus(dt_raw + dt_bias),  log_decay = -exp(A_log) dt

H heads of width P, state width N, G groups that share B and C among H / G heads each (group of head h: h // (H / G)).
Keywords as in `efla_kernels.delta_rule.ops`; the state is [sequences, H, N, P].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.argument_checks import compute_dtype, count_sequences, expect_4d, expect_shape, expect_state
from efla_kernels.backends import get_backend


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


def mamba2_step(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    *,
    dt_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """One token of `mamba2` with the state moved on in place; returns y [B, H, P] in x's dtype. Not differentiable.

    x [B, H, P]; dt [B, H] before softplus; A_log, D, dt_bias [H]; B and C [B, G, N]; state [B, H, N, P], fp32 (fp64 for
    fp64 inputs) and contiguous; dt_mask [B]. With backend "triton" one kernel, which a CUDA graph can hold.
    Raises ValueError.
    """
    token = [t.unsqueeze(1) for t in (x, dt, B, C)]
    _check(token[0], token[1], token[2], token[3], state, None)
    for name, parameter in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        expect_shape(name, parameter, (x.shape[1],), "[H]")
    if dt_mask is not None and dt_mask.shape != x.shape[:1]:
        raise ValueError(f"dt_mask: expected shape {list(x.shape[:1])} = [B], got {list(dt_mask.shape)}")
    wide = compute_dtype(x, dt, A_log, B, C, D, dt_bias)
    if state.dtype != wide or not state.is_contiguous():
        raise ValueError(
            f"state: expected a contiguous {wide} tensor, since it is updated in place, got {state.dtype}"
            f"{'' if state.is_contiguous() else ', not contiguous'}"
        )
    implementation = get_backend(backend, x.device, "mamba2")
    with torch.no_grad():
        fused = getattr(implementation, "mamba2_step", None)
        if fused is not None:
            return fused(x, dt, A_log, B, C, D, dt_bias, dt_mask, state)
        mask = None if dt_mask is None else dt_mask.unsqueeze(1)
        y, after = mamba2(
            token[0], token[1], A_log, token[2], token[3], D, dt_bias, dt_mask=mask, initial_state=state,
            output_final_state=True, backend=backend,
        )  # fmt: skip
        assert after is not None
        state.copy_(after)
        return y.squeeze(1)


def fuses_mamba2_step(backend: str, device: torch.device) -> bool:
    """Whether `mamba2_step` with this backend runs as one kernel."""
    return callable(getattr(get_backend(backend, device, "mamba2"), "mamba2_step", None))


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
