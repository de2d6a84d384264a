"""The last token's read-out on Triton: c_t of `last_token.py`, a vector carried from the last token to the first.

One warp per sequence and head holds r [K] in registers; a token costs its key's K numbers from memory, a dot product
and a multiply-add, and some thousand sequences run side by side. The keys of the next token are on their way while a
token is worked on. With d = exp(log_decay), h_t = d_t g_{t-1}, g_0 = 0, the backward pass goes from the first token on:

    dc_t' = dc_t - e_t k_t.h_t    de_t = -c_t k_t.h_t    d log_decay_t = h_t.r_t - e_t c_t k_t.h_t
    dk_t  = dc_t' r_t - e_t c_t h_t                      g_t = h_t + dc_t' k_t            dq = g_T
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from efla_kernels.launch.arguments import power_of_two
from efla_kernels.launch.choices import expect_triton
from efla_kernels.launch.dispatch import launch
from efla_kernels.launch.op import Autograd, register, wants_gradient


@triton.jit(do_not_specialize=["T"])
def last_forward_kernel(
    q,  # [B, H, K] fp32
    k,  # [B, T, H, K] fp32
    erase,  # [B, T, H] fp32
    log_decay,  # [B, T, H] fp32; DECAYS only
    c,  # out [B, T, H] fp32
    r,  # out [B, T, H, K] fp32; KEEP only
    T,
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DECAYS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
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
    H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DECAYS: tl.constexpr,
):  # fmt: skip
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


class Inputs(NamedTuple):
    """Contiguous fp32 tensors."""

    q: Tensor  # [B, H, K]
    k: Tensor  # [B, T, H, K]
    erase: Tensor  # [B, T, H]
    log_decay: Tensor | None  # [B, T, H]
    keep: bool  # r, which the backward pass reads


class Outputs(NamedTuple):
    """c [B, T, H], and r [B, T, H, K] or an empty tensor."""

    c: Tensor
    r: Tensor


class OutputGradients(NamedTuple):
    """The gradient that arrives."""

    c: Tensor


class Kept(NamedTuple):
    """What the backward pass reads."""

    c: Tensor
    r: Tensor
    k: Tensor
    erase: Tensor
    log_decay: Tensor | None


class Gradients(NamedTuple):
    """Gradients of the inputs, the last empty without a decay."""

    q: Tensor
    k: Tensor
    erase: Tensor
    log_decay: Tensor


def _allocate(x: Inputs) -> Outputs:
    return Outputs(torch.empty_like(x.erase), torch.empty_like(x.k) if x.keep else x.k.new_empty(0))


def _forward(x: Inputs) -> Outputs:
    (c, r), (B, T, H, _) = _allocate(x), x.k.shape
    decay = x.erase if x.log_decay is None else x.log_decay
    launch(
        last_forward_kernel, B * H, x.q, x.k, x.erase, decay, c, r, T, **_constants(x.k, x.log_decay), KEEP=x.keep
    )  # fmt: skip
    return Outputs(c, r)


def _keep(x: Inputs, out: Outputs) -> Kept:
    return Kept(out.c, out.r, x.k, x.erase, x.log_decay)


def _allocate_gradients(d: OutputGradients, kept: Kept) -> Gradients:
    k, erase = kept.k, kept.erase
    decay = erase.new_empty(0) if kept.log_decay is None else torch.empty_like(erase)
    return Gradients(k.new_empty(k.shape[0], *k.shape[2:]), torch.empty_like(k), torch.empty_like(erase), decay)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    c, r, k, erase, log_decay = kept
    found, (B, T, H, _) = _allocate_gradients(d, kept), k.shape
    decay = erase if log_decay is None else log_decay
    launch(last_backward_kernel, B * H, k, erase, decay, c, r, d.c, *found, T, **_constants(k, log_decay))
    return found


def _constants(k: Tensor, log_decay: Tensor | None) -> dict[str, Any]:
    H, K = k.shape[2:]
    return {"H": H, "K": K, "BK": max(32, power_of_two(K)), "DECAYS": log_decay is not None, "num_warps": 1}


last_token = register("last_token", _forward, _allocate, Autograd(_keep, _backward, _allocate_gradients), results=1)


def last_coefficients(q: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor | None) -> Tensor:
    """c [B, T, H] of fp32 q [B, H, K], k [B, T, H, K], erase and log_decay [B, T, H].

    Raises ValueError for other types than fp32, or tensors that are on no GPU.
    """
    inputs = [x for x in (q, k, erase, log_decay) if x is not None]
    if any(x.dtype != torch.float32 for x in inputs):
        raise ValueError(f"backend triton: expected fp32 at most, got {k.dtype}; use backend=torch")
    expect_triton(k, {"k": k.dtype})
    decay = None if log_decay is None else log_decay.contiguous()
    return last_token(Inputs(q.contiguous(), k.contiguous(), erase.contiguous(), decay, wants_gradient(inputs)))
