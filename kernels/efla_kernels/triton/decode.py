"""One token of a whole mixer in one kernel: convolution, SiLU, norms, gates, state, output norm.

One program per sequence and head. It owns that head's channels of q, k and v, so that the convolution's state and S are
updated in place without another program reading them; the whole row of outputs that the norm needs stays in registers.
S moves once in and once out (8 K V bytes), which is nearly all of the traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.triton.dispatch import launch
from efla_kernels.triton.gates import NORM_EPS, coefficients


@triton.jit
def convolved(x, conv_state, weight, b, channels, inside, D, W: tl.constexpr, BW: tl.constexpr):
    """SiLU of the convolution at `channels`, rounded as x is, in fp32; moves the state on by one token."""
    taps = tl.arange(0, BW)[:, None]
    mask = inside[None, :] & (taps < W)
    at = b * (W - 1) * D + taps * D + channels[None, :]
    past = tl.load(conv_state + at, mask=mask & (taps < W - 1), other=0.0).to(tl.float32)
    now = tl.load(x + b * D + channels, mask=inside, other=0.0).to(tl.float32)
    window = tl.where(taps == W - 1, now[None, :], past)
    factors = tl.load(weight + channels[None, :] * W + taps, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # every thread has read its taps before any tap moves
    tl.store(conv_state + at - D, window.to(conv_state.dtype.element_ty), mask=mask & (taps > 0))
    y = tl.sum(window * factors, 0)
    return (y * tl.sigmoid(y)).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def decode_kernel(
    x,  # [B, D], D = 2 H K + H V: q, k, v of all heads before the convolution
    conv_state,  # [B, W-1, D], updated
    conv_weight,  # [D, W]
    beta_logit,  # [B, H]
    decay_logit,  # [B, H]; DECAYS only
    A_log,  # [H]; DECAYS only
    dt_bias,  # [H]; DECAYS only
    state,  # [B, H, K, V] fp32, updated
    norm_weight,  # [V]
    output_gate,  # [B, H, V]; GATED only
    y,  # out [B, H, V]
    scale,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BLOCKS: tl.constexpr,  # of v, a power of two
    BW: tl.constexpr,
    MODE: tl.constexpr,
    DECAYS: tl.constexpr,
    GATED: tl.constexpr,
):
    h = tl.program_id(0) % H
    b = (tl.program_id(0) // H).to(tl.int64)
    D: tl.constexpr = 2 * H * K + H * V
    keys = tl.arange(0, BK)
    query = convolved(x, conv_state, conv_weight, b, h * K + keys, keys < K, D, W, BW)
    key = convolved(x, conv_state, conv_weight, b, (H + h) * K + keys, keys < K, D, W, BW)
    log_decay = 0.0
    if DECAYS:
        a = tl.load(decay_logit + b * H + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
        softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
        log_decay = -tl.exp(tl.load(A_log + h).to(tl.float32)) * softplus
    logit = tl.load(beta_logit + b * H + h).to(tl.float32)
    e, w, log_decay = coefficients(MODE, logit, log_decay, tl.sum(key * key, 0))
    query *= scale * tl.rsqrt(tl.sum(query * query, 0) + NORM_EPS)

    blocks = tl.arange(0, BLOCKS)[:, None]
    o = tl.zeros([BLOCKS, BV], tl.float32)
    for block in tl.static_range(BLOCKS):
        columns = block * BV + tl.arange(0, BV)
        inside = columns < V
        # after v: with S loaded before it, Triton 3.7 keeps S in two layouts and twice the registers
        value = convolved(x, conv_state, conv_weight, b, 2 * H * K + h * V + columns, inside, D, W, BW)
        at = state + (b * H + h) * K * V + keys[:, None] * V + columns[None, :]
        mask = (keys[:, None] < K) & inside[None, :]
        S = tl.load(at, mask=mask, other=0.0)
        if DECAYS:
            S *= tl.exp(log_decay)
        written = w * value - e * tl.sum(key[:, None] * S, 0)
        S += key[:, None] * written[None, :]
        tl.store(at, S, mask=mask)
        o += tl.where(blocks == block, tl.sum(query[:, None] * S, 0)[None, :], 0.0)

    o = o.to(y.dtype.element_ty).to(tl.float32)
    columns = blocks * BV + tl.arange(0, BV)[None, :]
    inside = columns < V
    o *= tl.rsqrt(tl.sum(tl.sum(o * o, 1), 0) / V + eps)
    o *= tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    at = (b * H + h) * V + columns
    if GATED:
        gate = tl.load(output_gate + at, mask=inside, other=0.0).to(tl.float32)
        o *= gate * tl.sigmoid(gate)
    tl.store(y + at, o.to(y.dtype.element_ty), mask=inside)


def decode_eagerly(
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
    rule: int,
    scale: float,
    eps: float,
) -> Tensor:
    """The kernel's launch; arguments as `efla_kernels.decode_step` has checked them."""
    B, H, K, V = state.shape
    W = conv_weight.shape[1]
    y = x.new_empty(B, H, V)
    BK = max(16, triton.next_power_of_2(K))
    # S is held in registers as a whole where that fits: all its loads are then under way at once
    BV = min(max(16, triton.next_power_of_2(V)), 16384 // BK)
    decays = decay_logit is not None
    launch(
        decode_kernel, B * H,
        x, conv_state, conv_weight, beta_logit, decay_logit if decays else x, A_log if decays else x,
        dt_bias if decays else x, state, norm_weight, x if output_gate is None else output_gate, y, scale, eps,
        H=H, K=K, V=V, W=W, BK=BK, BV=BV, BLOCKS=triton.next_power_of_2(-(-V // BV)), BW=triton.next_power_of_2(W),
        MODE=rule, DECAYS=decays, GATED=output_gate is not None, num_warps=8 if BK * BV >= 8192 else 4,
    )  # fmt: skip
    return y


decode = torch.library.custom_op("efla_kernels::decode", decode_eagerly, mutates_args=("conv_state", "state"))


@decode.register_fake
def _(x, conv_state, conv_weight, beta_logit, decay_logit, A_log, dt_bias, state, norm_weight, output_gate, *options):
    return x.new_empty(state.shape[0], state.shape[1], state.shape[3])
