"""The delta rule on Triton as an op of torch.library, and the backend "triton"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from efla_kernels.argument_checks import segment_offsets
from efla_kernels.delta_rule import buffers, launch
from efla_kernels.delta_rule.buffers import Gradients, Inputs, Kept, OutputGradients, Outputs
from efla_kernels.delta_rule.choices import MODES, Problem, choose, split_segments
from efla_kernels.launch.choices import expect_triton, processors
from efla_kernels.launch.op import Autograd, register, wants_gradient

WIDEST = 256

# what follows from the shapes is not worked out again for every layer of every step
known_problem = functools.lru_cache(maxsize=1024, typed=True)(Problem)


def _problem(x: Inputs, v: Tensor | None, make: Callable[..., Problem] = known_problem) -> Problem:
    """The problem of these inputs. Sizes of fake tensors may be symbols, which no cache takes for keys."""
    assert v is not None
    B, T, H, K = x.q.shape
    return make(
        batch=B, tokens=T, heads=H, key_width=K, value_width=v.shape[3],
        sequences=B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1,
        dtype=x.q.dtype, mode=x.mode, decays=x.decay is not None, packed=x.cu_seqlens is not None, scale=x.scale,
        segments=x.segments,
    )  # fmt: skip


def _forward(x: Inputs) -> Outputs:
    return launch.forward(_problem(x, x.v), x)


def _fake(x: Inputs) -> Outputs:
    return buffers.allocate_outputs(_problem(x, x.v, Problem), x)


def _backward(d: OutputGradients, kept: Kept) -> Gradients:
    x = kept.inputs
    return launch.backward(_problem(x, d.o if x.v is None else x.v), d, kept)


def _backward_fake(d: OutputGradients, kept: Kept) -> Gradients:
    x = kept.inputs
    return buffers.allocate_gradients(_problem(x, d.o if x.v is None else x.v, Problem), d, x)


delta = register("delta_rule", _forward, _fake, Autograd(buffers.kept, _backward, _backward_fake), results=2)


def _run(
    op: str, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, write: Tensor | None, decay: Tensor | None, *,
    recompute: bool, scale: float, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """One of `MODES` by its kernels; arguments as the public op has checked them."""
    B, T, H, K = q.shape
    V = v.shape[3]
    expect_triton(q, {"q": q.dtype, "k": k.dtype, "v": v.dtype})
    if max(K, V) > WIDEST:
        raise ValueError(f"backend triton: expected head widths up to {WIDEST}, got K={K}, V={V}; use backend=torch")
    if B * T * H == 0:
        return _empty(q, v, initial_state, output_final_state, cu_seqlens)
    if cu_seqlens is not None and not q.is_cuda:
        segment_offsets(cu_seqlens, T)  # on a GPU this check would make the host wait
    segments = 1
    if cu_seqlens is None:
        columns = choose(K, V, q.dtype, decay is not None).scan.columns
        segments = split_segments(B, T, H, K, V, columns, processors(q))
    keep_states = not recompute and wants_gradient((q, k, v, gate, write, decay, initial_state))
    initial = None if initial_state is None else initial_state.float().contiguous()
    o, final = delta(
        Inputs(
            q, k, v, gate, write, decay, initial, cu_seqlens, MODES[op], scale, segments, output_final_state,
            keep_states,
        )
    )  # fmt: skip
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

    def fused(op, q, k, v, beta_logit, log_g=None, **options):
        return _run(op, q, k, v, beta_logit, None, log_g, recompute=recompute, **options)

    models = {op: functools.partial(fused, op) for op in MODES if op != "delta_rule"}
    return SimpleNamespace(delta_rule=functools.partial(_run, "delta_rule", recompute=recompute), **models)
