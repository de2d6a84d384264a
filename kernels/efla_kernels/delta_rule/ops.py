"""Public ops: check the inputs, compute the coefficients (or hand the logits on raw), call a backend.

All take q, k [B, T, H, K] and v [B, T, H, V] in any float dtype and return (o [B, T, H, V] in v's dtype, final state
[N, H, K, V] in fp32 (fp64 for fp64 inputs), or None without `output_final_state`). Keywords shared by all:

    scale               factor on the output; K**-0.5 by default, as in flash-linear-attention
    initial_state       [N, H, K, V]; zeros by default
    output_final_state  return the state after the last token of each sequence
    cu_seqlens          int offsets [0, ..., T] of N packed sequences in one row (B must be 1); N = B without it
    backend             "auto", "torch" (chunked), "reference" (recurrence), "triton", "triton_recompute" (keeps
                        no chunk states for the backward pass, which computes them again), or one that was registered

Every malformed argument raises ValueError.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from efla_kernels.argument_checks import count_sequences, expect_4d, expect_shape, expect_state
from efla_kernels.backends import get_backend
from efla_kernels.delta_rule.coefficients import (
    beta_gate,
    erase_write_efla,
    gated_coefficients,
    squared_norm,
    unit_norm,
    widened,
)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, log_decay: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """S_t = exp(log_decay_t) (I - erase_t k_t k_t^T) S_{t-1} + write_t k_t v_t^T,  o_t = scale S_t^T q_t.

    erase, write and log_decay (<= 0; None is no decay) are [B, T, H]; q and k are taken as they come. The rule shrinks
    the state where 0 <= erase |k|^2 <= 1 and is unstable above 2.
    """
    gates = {"erase": erase, "write": write}
    return _run("delta_rule", q, k, v, gates, log_decay, scale, initial_state, output_final_state, cu_seqlens, backend)


def deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """DeltaNet: erase = write = beta = sigmoid(beta_logit [B, T, H]), q and k L2-normalised here."""
    gates = {"beta_logit": beta_logit}
    return _run("deltanet", q, k, v, gates, None, scale, initial_state, output_final_state, cu_seqlens, backend)


def efla(
    q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """EFLA: erase = write = a = (1 - exp(-beta |k|^2)) / |k|^2, q L2-normalised here, k raw."""
    gates = {"beta_logit": beta_logit}
    return _run("efla", q, k, v, gates, None, scale, initial_state, output_final_state, cu_seqlens, backend)


def gated_deltanet(
    q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, log_g: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated DeltaNet: as `deltanet` with log_decay = log_g [B, T, H], the logarithm of g in (0, 1]."""
    gates = {"beta_logit": beta_logit}
    return _run("gated_deltanet", q, k, v, gates, log_g, scale, initial_state, output_final_state, cu_seqlens, backend)


def gated_efla(
    q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, log_g: Tensor, *, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated EFLA: (e, w, g - 1) of `gated_coefficients` with g = exp(log_g [B, T, H]); q L2-normalised here, k raw."""
    gates = {"beta_logit": beta_logit}
    return _run("gated_efla", q, k, v, gates, log_g, scale, initial_state, output_final_state, cu_seqlens, backend)


def _run(
    op: str, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], log_decay: Tensor | None, scale: float | None,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What the five ops share; `log_decay` is log_g for the gated models."""
    expect_4d("q", q, "[B, T, H, K]")
    expect_shape("k", k, tuple(q.shape), "[B, T, H, K] as q")
    expect_4d("v", v, "[B, T, H, V]")
    expect_shape("v", v, (*q.shape[:3], v.shape[3]), "[B, T, H, V] with q's B, T, H")
    decay_name = "log_decay" if op == "delta_rule" else "log_g"
    for name, gate in {**gates, decay_name: log_decay}.items():
        if gate is not None:
            expect_shape(name, gate, tuple(q.shape[:3]), "[B, T, H]")
    sequences = count_sequences(q.shape[0], cu_seqlens)
    expect_state(initial_state, cu_seqlens, (sequences, q.shape[2], q.shape[3], v.shape[3]), "[N, H, K, V]")
    implementation = get_backend(backend, q.device, op)
    options = {
        "scale": q.shape[3] ** -0.5 if scale is None else scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
    }
    # a 16-bit autocast around the op must not reach the products of states and gates; switching it costs the host time
    cast = torch.compiler.is_compiling() or torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if cast else nullcontext():
        fused = getattr(implementation, op, None)
        if op == "delta_rule":
            return implementation.delta_rule(q, k, v, gates["erase"], gates["write"], log_decay, **options)
        if fused is not None:
            decays = () if log_decay is None else (log_decay,)
            return fused(q, k, v, gates["beta_logit"], *decays, **options)
        q, k, erase, write, log_decay = model_coefficients(op, q, k, gates["beta_logit"], log_decay)
        return implementation.delta_rule(q, k, v, erase, write, log_decay, **options)


def model_coefficients(
    op: str, q: Tensor, k: Tensor, beta_logit: Tensor, log_g: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(q, k, erase, write, log_decay) that make `delta_rule` the model `op`, all in fp32 (fp64 kept).

    k is up-cast also where it stays raw: its gradients through |k|^2 and through the rule are added before they are
    rounded to a narrow type. A backend that wants 16-bit operands offers the model's op itself.
    """
    q, k, beta = unit_norm(q), widened(k), beta_gate(beta_logit)
    if op in ("deltanet", "gated_deltanet"):
        return q, unit_norm(k), beta, beta, log_g
    if op == "efla":
        a = erase_write_efla(beta, squared_norm(k))
        return q, k, a, a, None
    if op != "gated_efla" or log_g is None:
        raise ValueError(f"op: expected deltanet, efla, gated_deltanet or gated_efla (with log_g), got {op!r}")
    return q, k, *gated_coefficients(beta, squared_norm(k), log_g)
