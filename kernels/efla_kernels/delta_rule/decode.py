"""One decoding step of a delta-rule mixer between its projections, states updated in place.

    q, k, v = silu(conv(x));  beta = sigmoid(beta_logit);  log g = -exp(A_log) softplus(decay_logit + dt_bias)
    S = exp(log_decay) (I - erase k k^T) S + write k v^T;  o = scale S^T q / |q|
    y = o / rms(o) * norm_weight [* silu(output_gate)]

Eight launches and more as separate ops; backend "triton" has it in one kernel that a CUDA graph can hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.argument_checks import expect_shape
from efla_kernels.backends import resolve_backend
from efla_kernels.delta_rule.coefficients import widened
from efla_kernels.delta_rule.ops import model_coefficients
from efla_kernels.delta_rule.reference import delta_step

RULES = ("deltanet", "efla", "gated_deltanet", "gated_efla")
TRITON = ("triton", "triton_recompute")  # they differ in training only


class Step(NamedTuple):
    """The arguments of `decode_step` by the names that it documents."""

    x: Tensor
    conv_state: Tensor
    conv_weight: Tensor
    beta_logit: Tensor
    decay_logit: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    state: Tensor
    norm_weight: Tensor
    output_gate: Tensor | None
    rule: str
    scale: float
    eps: float


def decode_step(
    rule: str, x: Tensor, conv_state: Tensor, conv_weight: Tensor, beta_logit: Tensor, state: Tensor,
    norm_weight: Tensor, *, decay_logit: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, output_gate: Tensor | None = None, scale: float | None = None,
    norm_eps: float = 1e-6, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """y [B, H, V] of one token, in x's dtype; `conv_state` and `state` are moved on in place. Not differentiable.

    Args:
        rule: "deltanet", "efla", "gated_deltanet" or "gated_efla".
        x: the token's q, k and v of all heads before the convolution, [B, D] with D = 2 H K + H V.
        conv_state: the W-1 inputs before x, [B, W-1, D], contiguous.
        conv_weight: [D, W], the last tap for x.
        beta_logit: [B, H].
        state: S, fp32 [B, H, K, V], contiguous.
        norm_weight: [V].
        decay_logit, A_log, dt_bias: [B, H], [H], [H]; for the gated rules.
        output_gate: raw gate [B, H, V], or None for the plain norm.
        scale: K**-0.5 by default.
        backend: "auto" (Triton on CUDA, else PyTorch), "torch" or "triton".

    Raises:
        ValueError: for anything that does not fit the above.
    """
    K = state.shape[2] if state.dim() == 4 else 1  # 1: `_check` raises
    scale = K**-0.5 if scale is None else scale
    step = Step(
        x, conv_state, conv_weight, beta_logit, decay_logit, A_log, dt_bias, state, norm_weight, output_gate, rule,
        scale, norm_eps,
    )  # fmt: skip
    _check(step)
    name = resolve_backend(backend, x.device, rule)
    if name not in ("torch", *TRITON):
        raise ValueError(f"decode_step: expected backend auto, torch or triton, got {backend!r}")
    with torch.no_grad():
        return _decode_triton(step) if name in TRITON else _decode(step)


def fuses_decoding(backend: str, device: torch.device, rule: str) -> bool:
    """Whether `decode_step` with this backend runs as one kernel."""
    return rule in RULES and resolve_backend(backend, device, rule) in TRITON


def _check(step: Step) -> None:
    """Check shapes and types."""
    x, conv_state, conv_weight, state, rule = step.x, step.conv_state, step.conv_weight, step.state, step.rule
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if state.dim() != 4 or state.dtype not in (torch.float32, torch.float64) or not state.is_contiguous():
        raise ValueError(
            f"state: expected a contiguous fp32 tensor [B, H, K, V], got {state.dtype} {list(state.shape)}"
            f"{'' if state.is_contiguous() else ', not contiguous'}"
        )
    B, H, K, V = state.shape
    D = 2 * H * K + H * V
    expect_shape("x", x, (B, D), "[B, 2 H K + H V] with state's B, H, K, V")
    if conv_weight.dim() != 2 or conv_weight.shape[1] < 2:
        raise ValueError(f"conv_weight: expected [D, W] with W of at least 2, got {list(conv_weight.shape)}")
    expect_shape("conv_weight", conv_weight, (D, conv_weight.shape[1]), "[D, W]")
    expect_shape("conv_state", conv_state, (B, conv_weight.shape[1] - 1, D), "[B, W-1, D]")
    if not conv_state.is_contiguous() or conv_state.dtype != x.dtype:
        raise ValueError(
            f"conv_state: expected a contiguous tensor of x's type {x.dtype}, got {conv_state.dtype} with strides "
            f"{conv_state.stride()}"
        )
    expect_shape("beta_logit", step.beta_logit, (B, H), "[B, H]")
    expect_shape("norm_weight", step.norm_weight, (V,), "[V]")
    if step.output_gate is not None:
        expect_shape("output_gate", step.output_gate, (B, H, V), "[B, H, V]")
    decay = {"decay_logit": step.decay_logit, "A_log": step.A_log, "dt_bias": step.dt_bias}
    gated = rule.startswith("gated")
    if any((given is not None) != gated for given in decay.values()):
        wanted = "decay_logit, A_log and dt_bias" if gated else "none of decay_logit, A_log, dt_bias"
        raise ValueError(
            f"{rule}: expected {wanted}, got {[None if d is None else list(d.shape) for d in decay.values()]}"
        )
    for name, given in decay.items():
        if given is not None:
            expect_shape(name, given, *(((B, H), "[B, H]") if name == "decay_logit" else ((H,), "[H]")))


def _decode(s: Step) -> Tensor:
    """The step in PyTorch; rounds to x's dtype where the kernel does."""
    _, H, K, V = s.state.shape
    window = torch.cat((s.conv_state, s.x.unsqueeze(1)), 1)
    s.conv_state.copy_(window[:, 1:])
    y = F.silu((widened(window) * widened(s.conv_weight).T).sum(1)).to(s.x.dtype)
    q, k, v = y.split((H * K, H * K, H * V), -1)
    log_g = None
    if s.decay_logit is not None and s.A_log is not None and s.dt_bias is not None:
        log_g = -widened(s.A_log).exp() * F.softplus(widened(s.decay_logit) + widened(s.dt_bias))
    q, k, erase, write, log_decay = model_coefficients(
        s.rule, q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), s.beta_logit, log_g
    )
    o, after = delta_step(s.state, q * s.scale, k, widened(v).unflatten(-1, (H, V)), erase, write, log_decay)
    s.state.copy_(after)
    o = F.rms_norm(widened(o.to(s.x.dtype)), (V,), eps=s.eps) * widened(s.norm_weight)
    if s.output_gate is not None:
        o = o * F.silu(widened(s.output_gate))
    return o.to(s.x.dtype)


def _decode_triton(s: Step) -> Tensor:
    from efla_kernels.delta_rule import decode_kernel
    from efla_kernels.launch.choices import expect_triton

    expect_triton(s.x, {"x": s.x.dtype})
    if s.state.dtype != torch.float32:
        raise ValueError(f"backend triton: expected an fp32 state, got {s.state.dtype}")
    # the states are contiguous already: a copy would not be updated
    return decode_kernel.decode(Step._make(t.contiguous() if isinstance(t, Tensor) else t for t in s))
