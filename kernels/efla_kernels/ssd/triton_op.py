"""State-space duality on Triton as an op of torch.library, and its part of the backend "triton"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from efla_kernels.argument_checks import segment_offsets
from efla_kernels.launch.choices import expect_triton, processors
from efla_kernels.launch.op import Autograd, register, wants_gradient
from efla_kernels.ssd import buffers, launch
from efla_kernels.ssd.buffers import Gradients, Inputs, Kept, OutputGradients, Outputs
from efla_kernels.ssd.choices import Problem
from efla_kernels.ssd.decode_kernel import StepInputs, step

LARGEST_STATE = {torch.bfloat16: 128 * 128, torch.float16: 128 * 128, torch.float32: 128 * 64}  # N P: shared memory

# what follows from the shapes is not worked out again for every layer of every step
known_problem = functools.lru_cache(maxsize=1024, typed=True)(Problem)


def _problem(i: Inputs, make: Callable[..., Problem] = known_problem) -> Problem:
    """The problem of these inputs. Sizes of fake tensors may be symbols, which no cache takes for keys."""
    batch, T, H, P = i.x.shape
    return make(
        batch=batch, tokens=T, heads=H, groups=i.B.shape[2], state_width=i.B.shape[3], width=P,
        sequences=batch if i.cu_seqlens is None else i.cu_seqlens.shape[0] - 1,
        dtype=i.x.dtype, packed=i.cu_seqlens is not None, processors=processors(i.x),
    )  # fmt: skip


def _forward(i: Inputs) -> Outputs:
    return launch.forward(_problem(i), i)


def _fake(i: Inputs) -> Outputs:
    return buffers.allocate_outputs(_problem(i, Problem), i)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    return launch.backward(_problem(kept.inputs), d, kept)


def _backward_fake(d: OutputGradients, kept: Kept) -> Gradients:
    return buffers.gradients_like(_problem(kept.inputs, Problem), kept.inputs)


duality = register("ssd", _forward, _fake, Autograd(buffers.kept, _backward, _backward_fake), results=2)


def _check(x: Tensor, B: Tensor, C: Tensor) -> None:
    expect_triton(x, {"x": x.dtype, "B": B.dtype, "C": C.dtype})
    N, P, most = B.shape[-1], x.shape[-1], LARGEST_STATE[x.dtype]
    if P > 128 or next_power_of_2(N) * next_power_of_2(P) > most:
        raise ValueError(
            f"backend triton: expected a head width P up to 128 and N P up to {most} for {x.dtype} (both rounded up to "
            f"powers of two), got N={N}, P={P}; use backend=torch"
        )


def _run(i: Inputs, recompute: bool) -> tuple[Tensor, Tensor | None]:
    """The op on inputs as the public op has checked them; sets `initial` in fp32 and `keep_states`."""
    _check(i.x, i.B, i.C)
    batch, T, H, P = i.x.shape
    if i.x.numel() == 0:  # no tokens: every state stays what it was
        N = batch if i.cu_seqlens is None else i.cu_seqlens.shape[0] - 1
        state = i.x.new_zeros(N, H, i.B.shape[3], P) if i.initial is None else i.initial
        return i.x.new_zeros(i.x.shape), state.float() if i.output_final else None
    if i.cu_seqlens is not None and not i.x.is_cuda:
        segment_offsets(i.cu_seqlens, T)  # on a GPU this check would make the host wait
    initial = None if i.initial is None else i.initial.float().contiguous()
    y, final = duality(i._replace(initial=initial, keep_states=not recompute and wants_gradient(i)))
    return y, final if i.output_final else None


def ssd_ops(recompute: bool) -> SimpleNamespace:
    """A backend's ops: `ssd` with steps and decays as given, `mamba2` with gates and skip fused in, and its step.

    recompute: keep no chunk states for the backward pass, which then runs the forward scan once more; saves 2 N P / L
    bytes per token and head at 16 bits, as much as x for L = N.
    """

    def ssd(x, dt, log_decay, B, C, **options):
        return run(x, dt, B, C, log_decay, None, None, None, None, **options)

    def mamba2(x, dt, A_log, B, C, D, dt_bias, *, dt_mask, **options):
        if dt_mask is not None and dt_mask.requires_grad:
            raise ValueError("backend triton: expected dt_mask without gradient; use backend=torch to differentiate it")
        return run(x, dt, B, C, None, A_log, dt_bias, D, dt_mask, **options)

    def run(
        *tensors: Any, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return _run(Inputs(*(*tensors, initial_state, cu_seqlens, output_final_state, False)), recompute)

    def mamba2_step(x, dt, A_log, B, C, D, dt_bias, dt_mask, state):
        _check(x, B, C)
        return step(StepInputs(x, dt, A_log, B, C, D, dt_bias, dt_mask, state))

    return SimpleNamespace(ssd=ssd, mamba2=mamba2, mamba2_step=mamba2_step)
