"""The delta rule on Triton as torch.library ops (fake tensors and autograd included), and the backend "triton"."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from efla_kernels.argument_checks import segment_offsets
from efla_kernels.delta_rule import launch
from efla_kernels.delta_rule.choices import CHUNK, MODES, Problem, choose, split_segments
from efla_kernels.delta_rule.launch import Saved
from efla_kernels.launch.op import differentiable, traced, wants_gradient

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def processors(device: int) -> int:
    """Multiprocessors of the GPU with this number."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# what follows from the shapes is not worked out again for every layer of every step
known_problem = functools.lru_cache(maxsize=1024, typed=True)(Problem)


def _problem(
    q: Tensor,
    v: Tensor,
    decay: bool,
    cu_seqlens: Tensor | None,
    mode: int,
    scale: float,
    segments: int,
    make: Callable[..., Problem] = Problem,
) -> Problem:
    """The problem of these inputs; sizes of fake tensors may be symbols, which no cache takes for keys."""
    B, T, H, K = q.shape
    return make(
        batch=B, tokens=T, heads=H, key_width=K, value_width=v.shape[3],
        sequences=B if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        dtype=q.dtype, mode=mode, decays=decay, packed=cu_seqlens is not None, scale=scale, segments=segments,
    )  # fmt: skip


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    mode: int,
    scale: float,
    segments: int,
    output_final: bool,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(o, final state, *Saved); see `launch.forward`."""
    problem = _problem(q, v, decay is not None, cu_seqlens, mode, scale, segments, known_problem)
    o, final, saved = launch.forward(
        problem, q, k, v, gate, write, decay, initial, cu_seqlens, output_final, keep_states
    )
    return o, final, *saved


delta_forward = torch.library.custom_op("efla_kernels::delta_forward", _forward, mutates_args=())


@delta_forward.register_fake
def _(q, k, v, gate, write, decay, initial, cu_seqlens, mode, scale, segments, output_final, keep_states):
    p = _problem(q, v, decay is not None, cu_seqlens, mode, scale, segments)
    fp32 = {"dtype": torch.float32}
    operand = {"dtype": p.operand}
    C, slots, split = CHUNK, (p.chunks, p.heads), segments > 1
    return (
        v.new_empty(v.shape),
        q.new_empty(p.state_shape(p.sequences) if output_final else (0,), **fp32),
        q.new_empty((*slots, C, C), **operand),
        q.new_empty((*slots, C, C) if keep_states else (0,), **operand),
        q.new_empty((*slots, p.columns, C), **fp32),
        q.new_empty(p.state_shape(p.chunks) if keep_states else (0,), **operand),
        q.new_empty((*slots, C, p.value_width) if keep_states else (0,), **operand),
        q.new_empty((p.sequences, segments, p.heads, p.key_width, p.key_width) if split else (0,), **fp32),
        q.new_empty(p.state_shape(p.sequences, segments) if split else (0,), **fp32),
    )


def _backward(
    do: Tensor,
    d_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    gate: Tensor,
    write: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    mode: int,
    scale: float,
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, d_gate, d_write, d_decay, d_initial); see `launch.backward`. v: None where it is not read."""
    do = do.contiguous()
    v = do if v is None else v
    problem = _problem(q, v, decay is not None, cu_seqlens, mode, scale, segments, known_problem)
    return launch.backward(problem, Saved(*saved), do, d_final, q, k, v, gate, write, decay, initial, cu_seqlens)


delta_backward = torch.library.custom_op("efla_kernels::delta_backward", _backward, mutates_args=())


@delta_backward.register_fake
def _(do, d_final, q, k, v, gate, write, decay, initial, cu_seqlens, saved, mode, scale, segments):
    v = do if v is None else v
    p = _problem(q, v, decay is not None, cu_seqlens, mode, scale, segments)
    fp32 = {"dtype": torch.float32}
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        gate.new_empty(gate.shape),
        gate.new_empty(0) if write is None else write.new_empty(write.shape),
        gate.new_empty(gate.shape if decay is not None else (0,), **fp32),
        q.new_empty(p.state_shape(p.sequences) if initial is not None else (0,), **fp32),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, gate, write, decay, initial, cu_seqlens, mode, scale, segments, _, keep_states = inputs
    ctx.set_materialize_grads(False)
    read = not keep_states or launch.reads_values(mode, decay is not None)
    ctx.save_for_backward(q, k, v if read else None, gate, write, decay, initial, cu_seqlens, *output[2:])
    ctx.options = (mode, scale, segments)


def _gradient(ctx: Any, do: Tensor | None, d_final: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, gate, write, decay, initial, cu_seqlens, *saved = ctx.saved_tensors
    if do is None:
        states = saved[Saved._fields.index("states")]
        do = torch.zeros_like(v) if v is not None else q.new_zeros(*q.shape[:3], states.shape[-1])
    backward = delta_backward if traced() else _backward
    dq, dk, dv, d_gate, d_write, d_decay, d_initial = backward(
        do, d_final, q, k, v, gate, write, decay, initial, cu_seqlens, saved, *ctx.options
    )
    return (
        dq,
        dk,
        dv,
        d_gate,
        None if write is None else d_write,
        None if decay is None else d_decay.to(decay.dtype),
        None if initial is None else d_initial.to(initial.dtype),
        *(None,) * 6,
    )


_delta = differentiable(delta_forward, _forward, _setup, _gradient, results=2)


def _run(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    write: Tensor | None,
    decay: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    recompute: bool,
) -> tuple[Tensor, Tensor | None]:
    B, T, H, K = q.shape
    V = v.shape[3]
    if not (q.dtype == k.dtype == v.dtype) or q.dtype not in DTYPES:
        raise ValueError(
            f"backend triton: expected q, k, v of one type among {DTYPES}, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if max(K, V) > WIDEST:
        raise ValueError(f"backend triton: expected head widths up to {WIDEST}, got K={K}, V={V}; use backend=torch")
    if not (q.is_cuda or interpreted()):
        raise ValueError(
            f"backend triton: expected CUDA tensors, got {q.device}; use backend=torch (or TRITON_INTERPRET=1)"
        )
    if B * T * H == 0:
        return _empty(q, v, initial_state, output_final_state, cu_seqlens)
    if cu_seqlens is not None and not q.is_cuda:
        segment_offsets(cu_seqlens, T)  # on a GPU this check would make the host wait
    segments = 1
    if cu_seqlens is None:
        available = processors(q.get_device()) if q.is_cuda else 132
        columns = choose(K, V, q.dtype, decay is not None).scan.columns
        segments = split_segments(B, T, H, K, V, columns, available)
    inputs = (q, k, v, gate, write, decay, initial_state)
    keep_states = not recompute and wants_gradient(inputs)
    initial = None if initial_state is None else initial_state.float().contiguous()
    o, final = _delta(
        q, k, v, gate, write, decay, initial, cu_seqlens, MODES[op], scale, segments, output_final_state, keep_states
    )
    return o, final if output_final_state else None


def _empty(
    q: Tensor, v: Tensor, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """No tokens: every state stays what it was."""
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (
        q.new_zeros(N, q.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
        if initial_state is None
        else initial_state
    )
    return v.new_zeros(v.shape), state.float() if output_final_state else None


def delta_ops(recompute: bool) -> SimpleNamespace:
    """A backend's ops: `delta_rule` with coefficients as given, and the models with norms and gates fused in.

    recompute: keep neither chunk states nor scores for the backward pass, which then runs the forward scan once more;
    saves 896 bytes per token and head at K = V = 128 and 16 bits.
    """

    def delta_rule(q, k, v, erase, write, log_decay, *, scale, initial_state, output_final_state, cu_seqlens):
        return _run(
            "delta_rule", q, k, v, erase, write, log_decay, scale, initial_state, output_final_state, cu_seqlens,
            recompute,
        )  # fmt: skip

    def fused(op, q, k, v, beta_logit, log_g=None, *, scale, initial_state, output_final_state, cu_seqlens):
        return _run(
            op, q, k, v, beta_logit, None, log_g, scale, initial_state, output_final_state, cu_seqlens, recompute
        )

    models = ("deltanet", "efla", "gated_deltanet", "gated_efla")
    return SimpleNamespace(delta_rule=delta_rule, **{op: functools.partial(fused, op) for op in models})
