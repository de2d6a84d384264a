"""State-space duality, one token: steps, decay, state and skip in one kernel, the state updated in place.

    dt = mask softplus(dt_raw + dt_bias)     S = exp(-exp(A_log) dt) S + dt B x^T     y = S^T C + D x

A program owns a block of columns of one head's state: it reads and writes them once, 8 N P bytes per head in all.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.launch.arguments import power_of_two
from efla_kernels.launch.dispatch import launch
from efla_kernels.launch.op import register
from efla_kernels.ssd.gates import rate, softplus


@triton.jit
def ssd_step_kernel(
    x,  # [batch, H, P]
    dt,  # [batch, H]
    A_log,  # [H]
    B,  # [batch, G, N]
    C,  # [batch, G, N]
    D,  # [H]
    dt_bias,  # [H]
    dt_mask,  # [batch]; MASKED
    state,  # [batch, H, N, P] fp32, updated
    y,  # out [batch, H, P]
    x_row,
    dt_row,
    b_row,
    c_row,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    BP: tl.constexpr,
    MASKED: tl.constexpr,
):
    blocks: tl.constexpr = (P + BP - 1) // BP
    row = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BP + tl.arange(0, BP)
    h = row % H
    b = (row // H).to(tl.int64)
    g = h // (H // G)
    n = tl.arange(0, BN)
    at = state + (b * H + h) * N * P + n[:, None] * P + columns[None, :]
    mask = (n[:, None] < N) & (columns[None, :] < P)
    S = tl.load(at, mask=mask, other=0.0)
    step = softplus(tl.load(dt + b * dt_row + h).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32))
    if MASKED:
        step *= tl.load(dt_mask + b).to(tl.float32)
    key = tl.load(B + b * b_row + g * N + n, mask=n < N, other=0.0).to(tl.float32)
    query = tl.load(C + b * c_row + g * N + n, mask=n < N, other=0.0).to(tl.float32)
    value = tl.load(x + b * x_row + h * P + columns, mask=columns < P, other=0.0).to(tl.float32)
    S = S * tl.exp(rate(A_log, h, h < H) * step) + (step * key)[:, None] * value[None, :]
    tl.store(at, S, mask=mask)
    out = tl.sum(S * query[:, None], 0) + tl.load(D + h).to(tl.float32) * value
    tl.store(y + (b * H + h) * P + columns, out.to(y.dtype.element_ty), mask=columns < P)


def _flat(x: Tensor) -> Tensor:
    """x [batch, heads, width] with heads right behind each other; rows may lie apart, as views of a projection do."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class StepInputs(NamedTuple):
    """One token of each sequence, as `efla_kernels.mamba2_step` has checked it; `state` is updated in place."""

    x: Tensor  # [batch, H, P]
    dt: Tensor  # [batch, H]
    A_log: Tensor  # [H]
    B: Tensor  # [batch, G, N]
    C: Tensor  # [batch, G, N]
    D: Tensor  # [H]
    dt_bias: Tensor  # [H]
    dt_mask: Tensor | None  # [batch]
    state: Tensor  # [batch, H, N, P] fp32


def _step(i: StepInputs) -> Tensor:
    batch, H, N, P = i.state.shape
    x, B, C = _flat(i.x), _flat(i.B), _flat(i.C)
    dt = i.dt if i.dt.stride(1) == 1 else i.dt.contiguous()
    y = x.new_empty(batch, H, P)
    # few rows: more programs per row, so that enough loads are under way
    BP = min(max(16, power_of_two(P)), 16 if batch * H < 256 else 64)
    launch(
        ssd_step_kernel, batch * H * -(-P // BP),
        x, dt, i.A_log, B, C, i.D, i.dt_bias, dt if i.dt_mask is None else i.dt_mask.contiguous(), i.state, y,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0),
        H=H, G=B.shape[1], N=N, P=P, BN=power_of_two(N), BP=BP, MASKED=i.dt_mask is not None,
        num_warps=4,
    )  # fmt: skip
    return y


def _fake(i: StepInputs) -> Tensor:
    return i.x.new_empty(i.x.shape)


step = register("ssd_step", _step, _fake, mutates=("state",))
