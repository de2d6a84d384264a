"""One token of a whole mixer in one kernel: convolution, SiLU, norms, gates, state, output norm.

One program per sequence and head. It owns that head's channels of q, k and v, so that the convolution's state and S are
updated in place without another program reading them; the whole row of outputs that the norm needs stays in registers.
S moves once in and once out (8 K V bytes), which is nearly all of the traffic. It is walked through in blocks of
columns, the next one under way, the first one asked for before anything is computed. S is read for k and q at once:

    u = S^T k,  r = S^T q  (both after the decay);  x = write v - erase u;  S += k x^T;  o = scale / |q| (r + (q.k) x)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.delta_rule.choices import MODES
from efla_kernels.delta_rule.decode import Step
from efla_kernels.delta_rule.gates import NORM_EPS, coefficients
from efla_kernels.launch.arguments import power_of_two
from efla_kernels.launch.dispatch import launch
from efla_kernels.launch.op import register

PROCESSORS = 132  # of an H200; up to as many programs have a multiprocessor each


@triton.jit
def longer(items, item):
    return items + (item,)  # noqa: RUF005  (Triton has no star)


@triton.jit
def window(x, conv_state, weight, b, channels, inside, D, W: tl.constexpr):
    """The last W inputs at `channels` and their taps' weights, two tuples. Loads alone, so that all are under way."""
    inputs = ()
    weights = ()
    for tap in tl.static_range(W):
        at = conv_state + (b * (W - 1) + tap) * D + channels if tap < W - 1 else x + b * D + channels
        inputs = longer(inputs, tl.load(at, mask=inside, other=0.0))
        weights = longer(weights, tl.load(weight + channels * W + tap, mask=inside, other=0.0))
    return inputs, weights


@triton.jit
def convolved(inputs, weights, W: tl.constexpr):
    """SiLU of the convolution, rounded as its inputs are, in fp32."""
    z = inputs[0].to(tl.float32) * weights[0].to(tl.float32)
    for tap in tl.static_range(1, W):
        z += inputs[tap].to(tl.float32) * weights[tap].to(tl.float32)
    return (z * tl.sigmoid(z)).to(inputs[0].dtype).to(tl.float32)


@triton.jit
def move_on(conv_state, inputs, b, channels, inside, D, W: tl.constexpr):
    """The convolution's state after this token: every input of the window but the oldest."""
    for tap in tl.static_range(1, W):
        tl.store(conv_state + (b * (W - 1) + tap - 1) * D + channels, inputs[tap], mask=inside)


@triton.jit
def add(a, b, c, x, y, z):
    return a + x, b + y, c + z


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
    scale, eps,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BLOCKS: tl.constexpr,  # of v, a power of two
    MODE: tl.constexpr, DECAYS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % H
    b = (tl.program_id(0) // H).to(tl.int64)
    D: tl.constexpr = 2 * H * K + H * V
    keys = tl.arange(0, BK)
    columns = tl.arange(0, BV)
    row = tl.arange(0, BLOCKS * BV)
    at = state + (b * H + h) * K * V + keys[:, None] * V + columns[None, :]
    S = tl.load(at, mask=(keys[:, None] < K) & (columns[None, :] < V), other=0.0)

    # loads first: a value that is computed in between waits for its own and holds up the others behind its barriers
    q_at, k_at, v_at = h * K + keys, (H + h) * K + keys, 2 * H * K + h * V + row
    q_inputs, q_weights = window(x, conv_state, conv_weight, b, q_at, keys < K, D, W)
    k_inputs, k_weights = window(x, conv_state, conv_weight, b, k_at, keys < K, D, W)
    v_inputs, v_weights = window(x, conv_state, conv_weight, b, v_at, row < V, D, W)
    logit = tl.load(beta_logit + b * H + h).to(tl.float32)
    log_decay = 0.0
    if DECAYS:
        a = tl.load(decay_logit + b * H + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
        softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
        log_decay = -tl.exp(tl.load(A_log + h).to(tl.float32)) * softplus
    y_at = (b * H + h) * V + row
    factor = tl.load(norm_weight + row, mask=row < V, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(output_gate + y_at, mask=row < V, other=0.0).to(tl.float32)
        factor *= gate * tl.sigmoid(gate)

    query, key = convolved(q_inputs, q_weights, W), convolved(k_inputs, k_weights, W)
    kk, qq, qk = tl.reduce((key * key, query * query, query * key), 0, add)
    tl.debug_barrier()  # every thread has read its taps before any tap moves
    move_on(conv_state, q_inputs, b, q_at, keys < K, D, W)
    move_on(conv_state, k_inputs, b, k_at, keys < K, D, W)
    move_on(conv_state, v_inputs, b, v_at, row < V, D, W)
    e, w, log_decay = coefficients(MODE, logit, log_decay, kk)
    scale *= tl.rsqrt(qq + NORM_EPS)
    query *= scale
    qk *= scale

    value = tl.reshape(w * convolved(v_inputs, v_weights, W), [BLOCKS, BV])
    o = tl.zeros([BLOCKS, BV], tl.float32)
    blocks = tl.arange(0, BLOCKS)[:, None]
    for block in tl.static_range(BLOCKS):
        if block + 1 < BLOCKS:
            mask = (keys[:, None] < K) & ((block + 1) * BV + columns[None, :] < V)
            ahead = tl.load(at + (block + 1) * BV, mask=mask, other=0.0)
        if DECAYS:
            S *= tl.exp(log_decay)
        written = tl.sum(tl.where(blocks == block, value, 0.0), 0) - e * tl.sum(key[:, None] * S, 0)
        read = tl.sum(query[:, None] * S, 0) + qk * written
        mask = (keys[:, None] < K) & (block * BV + columns[None, :] < V)
        tl.store(at + block * BV, S + key[:, None] * written[None, :], mask=mask)
        o += tl.where(blocks == block, read[None, :], 0.0)
        if block + 1 < BLOCKS:
            S = ahead

    o = tl.reshape(o, [BLOCKS * BV]).to(y.dtype.element_ty).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps) * factor
    tl.store(y + y_at, o.to(y.dtype.element_ty), mask=row < V)


def _forward(s: Step) -> Tensor:
    B, H, K, V = s.state.shape
    y = _fake(s)
    # A thread per key: with more, Triton 3.6 loads q, k and v once per thread that holds a part of S.
    BK = max(32, power_of_two(K))
    needed = max(16, power_of_two(V))
    BV = block_columns(B * H, needed)
    given = (s.x if t is None else t for t in (s.decay_logit, s.A_log, s.dt_bias))  # x stands in for what is absent
    launch(
        decode_kernel, B * H,
        s.x, s.conv_state, s.conv_weight, s.beta_logit, *given, s.state, s.norm_weight,
        s.x if s.output_gate is None else s.output_gate, y, s.scale, s.eps,
        H=H, K=K, V=V, W=s.conv_weight.shape[1], BK=BK, BV=BV, BLOCKS=needed // BV, MODE=MODES[s.rule],
        DECAYS=s.decay_logit is not None, GATED=s.output_gate is not None, num_warps=BK // 32,
    )  # fmt: skip
    return y


def _fake(s: Step) -> Tensor:
    return s.x.new_empty(s.state.shape[0], s.state.shape[1], s.state.shape[3])


def block_columns(programs: int, V: int) -> int:
    """Columns of S, and with a thread per key numbers in each thread, that are held at once.

    All of them where few programs run, so that one wait serves all loads (two blocks are under way, hence 64 of more
    than 128); few columns where many run, so that a multiprocessor has several programs whose waits differ.
    """
    if programs > PROCESSORS:
        return min(32, V)
    return V if V <= 128 else 64


decode = register("decode", _forward, _fake, mutates=("conv_state", "state"))
