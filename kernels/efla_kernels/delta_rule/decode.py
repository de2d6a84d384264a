"""One decoding step of a delta-rule mixer between its projections, states updated in place.

    q, k, v = silu(conv(x));  beta = sigmoid(beta_logit);  log g = -exp(A_log) softplus(decay_logit + dt_bias)
    S = exp(log_decay) (I - erase k k^T) S + write k v^T;  o = scale S^T q / |q|
    y = o / rms(o) * norm_weight [* silu(output_gate)]

Eight launches and more as separate ops; backend "triton" has it in one kernel that a CUDA graph can hold.
"""

from __future__ import annotations

from typing import Any

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


def decode_step(
    rule: str,
    x: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    beta_logit: Tensor,
    state: Tensor,
    norm_weight: Tensor,
    *,
    decay_logit: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    output_gate: Tensor | None = None,
    scale: float | None = None,
    norm_eps: float = 1e-6,
    backend: str = "auto",
) -> Tensor:
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
    gated = _check(rule, x, conv_state, conv_weight, beta_logit, state, norm_weight, output_gate)
    decay = (decay_logit, A_log, dt_bias)
    if any((given is not None) != gated for given in decay):
        wanted = "decay_logit, A_log and dt_bias" if gated else "none of decay_logit, A_log, dt_bias"
        raise ValueError(f"{rule}: expected {wanted}, got {[None if d is None else list(d.shape) for d in decay]}")
    B, H, K, _ = state.shape
    for name, given, shape in zip(("decay_logit", "A_log", "dt_bias"), decay, ((B, H), (H,), (H,)), strict=True):
        if given is not None:
            expect_shape(name, given, shape, "[B, H]" if len(shape) == 2 else "[H]")
    scale = K**-0.5 if scale is None else scale
    name = resolve_backend(backend, x.device, rule)
    if name not in ("torch", *TRITON):
        raise ValueError(f"decode_step: expected backend auto, torch or triton, got {backend!r}")
    arguments = (x, conv_state, conv_weight, beta_logit, *decay, state, norm_weight, output_gate)
    with torch.no_grad():
        if name == "torch":
            return _decode(rule, *arguments, scale, norm_eps)
        return _decode_triton(rule, arguments, scale, norm_eps)


def fuses_decoding(backend: str, device: torch.device, rule: str) -> bool:
    """Whether `decode_step` with this backend runs as one kernel."""
    return rule in RULES and resolve_backend(backend, device, rule) in TRITON


def _check(
    rule: str,
    x: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    beta_logit: Tensor,
    state: Tensor,
    norm_weight: Tensor,
    output_gate: Tensor | None,
) -> bool:
    """Check shapes and types; whether the rule is a gated one."""
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
    expect_shape("beta_logit", beta_logit, (B, H), "[B, H]")
    expect_shape("norm_weight", norm_weight, (V,), "[V]")
    if output_gate is not None:
        expect_shape("output_gate", output_gate, (B, H, V), "[B, H, V]")
    return rule.startswith("gated")


def _decode(
    rule: str,
    x: Tensor,
    conv_state: Tensor,
    conv_weight: Tensor,
    beta_logit: Tensor,
    decay_logit: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    norm_weight: Tensor,
    output_gate: Tensor | None,
    scale: float,
    eps: float,
) -> Tensor:
    """The step in PyTorch; rounds to x's dtype where the kernel does."""
    _, H, K, V = state.shape
    window = torch.cat((conv_state, x.unsqueeze(1)), 1)
    conv_state.copy_(window[:, 1:])
    y = F.silu((widened(window) * widened(conv_weight).T).sum(1)).to(x.dtype)
    q, k, v = y.split((H * K, H * K, H * V), -1)
    log_g = None
    if decay_logit is not None and A_log is not None and dt_bias is not None:
        log_g = -widened(A_log).exp() * F.softplus(widened(decay_logit) + widened(dt_bias))
    q, k, erase, write, log_decay = model_coefficients(
        rule, q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), beta_logit, log_g
    )
    o, after = delta_step(state, q * scale, k, widened(v).unflatten(-1, (H, V)), erase, write, log_decay)
    state.copy_(after)
    o = F.rms_norm(widened(o.to(x.dtype)), (V,), eps=eps) * widened(norm_weight)
    if output_gate is not None:
        o = o * F.silu(widened(output_gate))
    return o.to(x.dtype)


def _decode_triton(rule: str, arguments: tuple[Tensor | None, ...], scale: float, eps: float) -> Tensor:
    from efla_kernels.delta_rule import choices
    from efla_kernels.delta_rule import decode_kernel as decode
    from efla_kernels.launch.choices import expect_triton
    from efla_kernels.launch.op import traced

    x, *rest = arguments
    state = arguments[7]
    assert x is not None and state is not None
    expect_triton(x, {"x": x.dtype})
    if state.dtype != torch.float32:
        raise ValueError(f"backend triton: expected an fp32 state, got {state.dtype}")
    # the states are contiguous already: a copy would not be updated
    inputs: list[Any] = [None if t is None else t.contiguous() for t in (x, *rest)]
    step: Any = decode.decode if traced() else decode.decode_eagerly
    return step(*inputs, choices.MODES[rule], scale, eps)
