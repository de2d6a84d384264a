"""The last token's read-out on Triton: c_t of `last_token.py`, a vector carried from the last token to the first.

One warp per sequence and head holds r [K] in registers; a token costs its key's K numbers from memory, a dot product
and a multiply-add, and some thousand sequences run side by side. The keys of the next token are on their way while a
token is worked on. With d = exp(log_decay), h_t = d_t g_{t-1}, g_0 = 0, the backward pass goes from the first token on:

    dc_t' = dc_t - e_t k_t.h_t    de_t = -c_t k_t.h_t    d log_decay_t = h_t.r_t - e_t c_t k_t.h_t
    dk_t  = dc_t' r_t - e_t c_t h_t                      g_t = h_t + dc_t' k_t            dq = g_T
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.launch.choices import interpreted


@triton.jit(do_not_specialize=["T"])
def last_forward_kernel(
    q,  # [B, H, K] fp32
    k,  # [B, T, H, K] fp32
    erase,  # [B, T, H] fp32
    log_decay,  # [B, T, H] fp32; DECAYS only
    c,  # out [B, T, H] fp32
    r,  # out [B, T, H, K] fp32; KEEP only
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    DECAYS: tl.constexpr,
    KEEP: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = n // H * T * H + n % H  # row of the sequence's first token
    row = first + (T - 1) * H
    columns = tl.arange(0, BK)
    inside = columns < K
    vector = tl.load(q + n * K + columns, mask=inside, other=0.0)
    key = tl.load(k + row * K + columns, mask=inside, other=0.0)
    e = tl.load(erase + row)
    for _ in range(T):
        before = tl.maximum(row - H, first)
        key_before = tl.load(k + before * K + columns, mask=inside, other=0.0)
        e_before = tl.load(erase + before)
        if KEEP:
            tl.store(r + row * K + columns, vector, mask=inside)
        read = tl.sum(key * vector, 0)
        tl.store(c + row, read)
        vector -= (e * read) * key
        if DECAYS:
            vector *= tl.exp(tl.load(log_decay + row))
        row, key, e = before, key_before, e_before


@triton.jit(do_not_specialize=["T"])
def last_backward_kernel(
    k,  # [B, T, H, K] fp32
    erase,  # [B, T, H] fp32
    log_decay,  # [B, T, H] fp32; DECAYS only
    c,  # [B, T, H] fp32
    r,  # [B, T, H, K] fp32
    d_c,  # [B, T, H] fp32
    d_q,  # out [B, H, K] fp32
    d_k,  # out [B, T, H, K] fp32
    d_erase,  # out [B, T, H] fp32
    d_log_decay,  # out [B, T, H] fp32; DECAYS only
    T,
    H: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    DECAYS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    row = n // H * T * H + n % H
    last = row + (T - 1) * H
    columns = tl.arange(0, BK)
    inside = columns < K
    g = tl.zeros([BK], tl.float32)
    key = tl.load(k + row * K + columns, mask=inside, other=0.0)
    vector = tl.load(r + row * K + columns, mask=inside, other=0.0)
    e = tl.load(erase + row)
    read = tl.load(c + row)
    given = tl.load(d_c + row)
    for _ in range(T):
        after = tl.minimum(row + H, last)
        key_after = tl.load(k + after * K + columns, mask=inside, other=0.0)
        vector_after = tl.load(r + after * K + columns, mask=inside, other=0.0)
        e_after = tl.load(erase + after)
        read_after = tl.load(c + after)
        given_after = tl.load(d_c + after)
        if DECAYS:
            g *= tl.exp(tl.load(log_decay + row))
        along = tl.sum(key * g, 0)
        total = given - e * along
        tl.store(d_erase + row, -read * along)
        if DECAYS:
            tl.store(d_log_decay + row, tl.sum(g * vector, 0) - e * read * along)
        tl.store(d_k + row * K + columns, total * vector - (e * read) * g, mask=inside)
        g += total * key
        row, key, vector, e, read, given = after, key_after, vector_after, e_after, read_after, given_after
    tl.store(d_q + n * K + columns, g, mask=inside)


def _options(k: Tensor, log_decay: Tensor | None) -> dict[str, Any]:
    H, K = k.shape[2:]
    return {"H": H, "K": K, "BK": max(32, triton.next_power_of_2(K)), "DECAYS": log_decay is not None, "num_warps": 1}


@torch.library.custom_op("efla_kernels::last_forward", mutates_args=())
def last_forward(q: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """(c [B, T, H], r [B, T, H, K] or nothing without `keep`); contiguous fp32 tensors."""
    B, T, H, _ = k.shape
    c, r = torch.empty_like(erase), torch.empty_like(k) if keep else k.new_empty(0)
    last_forward_kernel[(B * H,)](
        q, k, erase, erase if log_decay is None else log_decay, c, r if keep else c, T, **_options(k, log_decay),
        KEEP=keep,
    )  # fmt: skip
    return c, r


@last_forward.register_fake
def _(q, k, erase, log_decay, keep):
    return torch.empty_like(erase), torch.empty_like(k) if keep else k.new_empty(0)


@torch.library.custom_op("efla_kernels::last_backward", mutates_args=())
def last_backward(
    d_c: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor | None, c: Tensor, r: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, d_erase, d_log_decay or nothing)."""
    B, T, H, K = k.shape
    d_q, d_k, d_erase = k.new_empty(B, H, K), torch.empty_like(k), torch.empty_like(erase)
    d_log_decay = erase.new_empty(0) if log_decay is None else torch.empty_like(erase)
    decay = (erase, d_erase) if log_decay is None else (log_decay, d_log_decay)
    last_backward_kernel[(B * H,)](
        k, erase, decay[0], c, r, d_c.contiguous(), d_q, d_k, d_erase, decay[1], T, **_options(k, log_decay)
    )
    return d_q, d_k, d_erase, d_log_decay


@last_backward.register_fake
def _(d_c, k, erase, log_decay, c, r):
    B, _, H, K = k.shape
    return (
        k.new_empty(B, H, K),
        torch.empty_like(k),
        torch.empty_like(erase),
        erase.new_empty(0) if log_decay is None else torch.empty_like(erase),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, k, erase, log_decay, _ = inputs
    ctx.save_for_backward(k, erase, log_decay, *output)


def _gradient(ctx: Any, d_c: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    k, erase, log_decay, c, r = ctx.saved_tensors
    d_q, d_k, d_erase, d_log_decay = last_backward(d_c, k, erase, log_decay, c, r)
    return d_q, d_k, d_erase, None if log_decay is None else d_log_decay, None


last_forward.register_autograd(_gradient, setup_context=_setup)


def last_coefficients(q: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor | None) -> Tensor:
    """c [B, T, H] of fp32 q [B, H, K], k [B, T, H, K], erase and log_decay [B, T, H].

    Raises:
        ValueError: other types than fp32, or tensors that are on no GPU.
    """
    inputs = [x for x in (q, k, erase, log_decay) if x is not None]
    if any(x.dtype != torch.float32 for x in inputs):
        raise ValueError(f"backend triton: expected fp32 at most, got {k.dtype}; use backend=torch")
    if not (k.is_cuda or interpreted()):
        raise ValueError(f"backend triton: expected CUDA tensors, got {k.device}; use backend=torch")
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    decay = None if log_decay is None else log_decay.contiguous()
    return last_forward(q.contiguous(), k.contiguous(), erase.contiguous(), decay, keep)[0]
