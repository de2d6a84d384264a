"""State-space duality on Triton as torch.library ops (fake tensors and autograd included)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from efla_kernels.argument_checks import segment_offsets
from efla_kernels.launch.choices import DTYPES, interpreted, processors
from efla_kernels.launch.op import differentiable, traced, wants_gradient
from efla_kernels.ssd import launch as ssd_launch
from efla_kernels.ssd.choices import Problem
from efla_kernels.ssd.decode_kernel import ssd_step, step
from efla_kernels.ssd.launch import Steps

LARGEST_STATE = {torch.bfloat16: 128 * 128, torch.float16: 128 * 128, torch.float32: 128 * 64}  # N P: shared memory


# what follows from the shapes is not worked out again for every layer of every step
known_problem = functools.lru_cache(maxsize=1024, typed=True)(Problem)


def _problem(x: Tensor, B: Tensor, cu_seqlens: Tensor | None, make: Callable[..., Problem] = Problem) -> Problem:
    """The problem of these inputs; sizes of fake tensors may be symbols, which no cache takes for keys."""
    batch, T, H, P = x.shape
    return make(
        batch=batch, tokens=T, heads=H, groups=B.shape[2], state_width=B.shape[3], width=P,
        sequences=batch if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        dtype=x.dtype, packed=cu_seqlens is not None,
        processors=processors(x),
    )  # fmt: skip


def _forward(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    log_decay: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    D: Tensor | None,
    dt_mask: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final: bool,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, final state, table, states or empty); see `ssd_launch.forward`."""
    steps = Steps(log_decay, A_log, dt_bias, D, dt_mask)
    y, final, table, states = ssd_launch.forward(
        _problem(x, B, cu_seqlens, known_problem), x, dt, B, C, steps, initial, cu_seqlens, output_final
    )
    return y, final, table, states if keep_states else states.new_empty(0)


ssd_forward = torch.library.custom_op("efla_kernels::ssd_forward", _forward, mutates_args=())


@ssd_forward.register_fake
def _(x, dt, B, C, log_decay, A_log, dt_bias, D, dt_mask, initial, cu_seqlens, output_final, keep_states):
    p = _problem(x, B, cu_seqlens)
    return (
        x.new_empty(x.shape),
        x.new_empty(p.state_shape(p.sequences) if output_final else (0,), dtype=torch.float32),
        x.new_empty((p.chunks, p.heads, 2, p.choice.chunk), dtype=torch.float32),
        x.new_empty(p.state_shape(p.chunks) if keep_states else (0,), dtype=p.operand),
    )


def _backward(
    dy: Tensor,
    d_final: Tensor | None,
    table: Tensor,
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    log_decay: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    D: Tensor | None,
    dt_mask: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, d_dt, dB, dC, d_log_decay, (d_A_log, d_dt_bias), dD, d_initial); see `ssd_launch.backward`."""
    steps = Steps(log_decay, A_log, dt_bias, D, dt_mask)
    problem = _problem(x, B, cu_seqlens, known_problem)
    return ssd_launch.backward(problem, table, states, dy, d_final, x, dt, B, C, steps, initial, cu_seqlens)


ssd_backward = torch.library.custom_op("efla_kernels::ssd_backward", _backward, mutates_args=())


@ssd_backward.register_fake
def _(dy, d_final, table, states, x, dt, B, C, log_decay, A_log, dt_bias, D, dt_mask, initial, cu_seqlens):
    p = _problem(x, B, cu_seqlens)
    fp32 = {"dtype": torch.float32}
    return (
        x.new_empty(x.shape),
        dt.new_empty(dt.shape),
        B.new_empty(B.shape),
        C.new_empty(C.shape),
        x.new_empty(dt.shape if A_log is None else (0,), **fp32),
        x.new_empty((2, p.heads if A_log is not None else 0), **fp32),
        x.new_empty((p.heads,) if D is not None else (0,), **fp32),
        x.new_empty(p.state_shape(p.sequences) if initial is not None else (0,), **fp32),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:11], *output[2:])


def _gradient(ctx: Any, dy: Tensor | None, d_final: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, dt, B, C, log_decay, A_log, dt_bias, D, dt_mask, initial, cu_seqlens, table, states = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    given = (x, dt, B, C, log_decay, A_log, dt_bias, D, dt_mask, initial)
    dx, d_dt, dB, dC, d_decay, d_parameters, dD, d_initial = (ssd_backward if traced() else _backward)(
        dy, d_final, table, states, *given, cu_seqlens
    )
    inputs = (x, dt, B, C, log_decay, A_log, dt_bias, D)
    grads = (dx, d_dt, dB, dC, d_decay, *d_parameters.unbind(0), dD)
    own = [None if t is None else grad.to(t.dtype) for t, grad in zip(inputs, grads, strict=True)]
    return (*own, None, None if initial is None else d_initial.to(initial.dtype), None, None, None)


_ssd = differentiable(ssd_forward, _forward, _setup, _gradient, results=2)


def _check(x: Tensor, B: Tensor, C: Tensor) -> None:
    if not (x.dtype == B.dtype == C.dtype) or x.dtype not in DTYPES:
        raise ValueError(
            f"backend triton: expected x, B, C of one type among {DTYPES}, got {x.dtype}, {B.dtype}, {C.dtype}"
        )
    N, P = B.shape[-1], x.shape[-1]
    most = LARGEST_STATE[x.dtype]
    if P > 128 or next_power_of_2(N) * next_power_of_2(P) > most:
        raise ValueError(
            f"backend triton: expected a head width P up to 128 and N P up to {most} for {x.dtype} (both rounded up to "
            f"powers of two), got N={N}, P={P}; use backend=torch"
        )
    if not (x.is_cuda or interpreted()):
        raise ValueError(
            f"backend triton: expected CUDA tensors, got {x.device}; use backend=torch (or TRITON_INTERPRET=1)"
        )


def _run(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    steps: Steps,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    recompute: bool,
) -> tuple[Tensor, Tensor | None]:
    _check(x, B, C)
    batch, T, H, P = x.shape
    if x.numel() == 0:  # no tokens: every state stays what it was
        N = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        kept = x.new_zeros(N, H, B.shape[3], P) if initial_state is None else initial_state
        return x.new_zeros(x.shape), kept.float() if output_final_state else None
    if cu_seqlens is not None and not x.is_cuda:
        segment_offsets(cu_seqlens, T)  # on a GPU this check would make the host wait
    initial = None if initial_state is None else initial_state.float().contiguous()
    inputs = (x, dt, B, C, *steps, initial)
    wanted = wants_gradient(inputs)
    y, final = _ssd(*inputs, cu_seqlens, output_final_state, wanted and not recompute)
    return y, final if output_final_state else None


def ssd_ops(recompute: bool) -> SimpleNamespace:
    """A backend's ops: `ssd` with steps and decays as given, `mamba2` with gates and skip fused in, and its step.

    recompute: keep no chunk states for the backward pass, which then runs the forward scan once more; saves 2 N P / L
    bytes per token and head at 16 bits, as much as x for L = N.
    """

    def ssd(x, dt, log_decay, B, C, *, initial_state, output_final_state, cu_seqlens):
        steps = Steps(log_decay, None, None, None, None)
        return _run(x, dt, B, C, steps, initial_state, output_final_state, cu_seqlens, recompute)

    def mamba2(x, dt, A_log, B, C, D, dt_bias, *, dt_mask, initial_state, output_final_state, cu_seqlens):
        if dt_mask is not None and dt_mask.requires_grad:
            raise ValueError("backend triton: expected dt_mask without gradient; use backend=torch to differentiate it")
        steps = Steps(None, A_log, dt_bias, D, dt_mask)
        return _run(x, dt, B, C, steps, initial_state, output_final_state, cu_seqlens, recompute)

    def mamba2_step(x, dt, A_log, B, C, D, dt_bias, dt_mask, state):
        _check(x, B, C)
        return (ssd_step if traced() else step)(x, dt, A_log, B, C, D, dt_bias, dt_mask, state)

    return SimpleNamespace(ssd=ssd, mamba2=mamba2, mamba2_step=mamba2_step)
