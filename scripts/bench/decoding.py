"""The decoding step of a mixer: ours in one kernel, fla's as the chain of operations that its layers call.

The benchmark times one token of a whole model: one step per layer, each with its own inputs, weights and states, all in
one CUDA graph. States then come from the device's memory and not from its cache, as in a whole model, and the layers
share the few microseconds that a replay of the graph costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import efla_kernels
import torch
from torch import Tensor

from scripts.bench import mamba_calls
from scripts.bench.measure import Tensors, Unserved

KERNEL_SIZE = 4
Step = Callable[[], Tensor]


def decode_inputs(rule: str, batch: int, heads: int, width: int, dtype: torch.dtype, device: str) -> Tensors:
    """Seeded arguments of `efla_kernels.decode_step` (of `mamba2_step` for mamba2)."""
    if rule == "mamba2":
        return mamba_calls.decode_inputs(batch, heads, width, dtype, device)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    D = 3 * heads * width
    tensors = {
        "x": normal(batch, D).to(dtype),
        "conv_state": normal(batch, KERNEL_SIZE - 1, D).to(dtype),
        "conv_weight": (normal(D, KERNEL_SIZE) / KERNEL_SIZE**0.5).to(dtype),
        "beta_logit": normal(batch, heads).to(dtype),
        "state": normal(batch, heads, width, width),
        "norm_weight": (1 + 0.1 * normal(width)).to(dtype),
    }
    if rule.startswith("gated"):
        tensors |= {"decay_logit": normal(batch, heads).to(dtype), "A_log": normal(heads), "dt_bias": normal(heads) - 2}
        tensors["output_gate"] = normal(batch, heads, width).to(dtype)
    return {name: x.to(device) for name, x in tensors.items()}


def layers(tensors: Tensors, least: int) -> list[Tensors]:
    """Copies of a step's inputs for as many layers: `least`, or more until the states fill the L2 cache twice."""
    device, state = tensors["state"].device, tensors["state"].nbytes
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return [{name: x.clone() for name, x in tensors.items()} for _ in range(max(least, -(-2 * cache // state)))]


def truth(rule: str, tensors: Tensors) -> Tensor:
    """y in float64 from the rounded inputs."""
    wide: dict[str, Any] = {name: x.to(torch.float64, copy=True) for name, x in tensors.items()}
    if rule == "mamba2":
        return efla_kernels.mamba2_step(**wide, backend="torch")
    return efla_kernels.decode_step(rule, **wide, backend="torch")


def make_step(rule: str, impl: str, tensors: Tensors) -> Step:
    """A function that decodes one token from `tensors` and may update their states; raises `Unserved`."""
    if impl in ("ours", "torch"):
        backend = "triton" if impl == "ours" else "torch"
        op = efla_kernels.mamba2_step if rule == "mamba2" else functools.partial(efla_kernels.decode_step, rule)
        return functools.partial(op, **tensors, backend=backend)
    if impl == "mamba_ssm":
        try:
            kernel = mamba_calls.mamba_ssm_kernel("selective_state_update", "selective_state_update")
        except ImportError as missing:
            raise Unserved(str(missing)) from missing
        return mamba_calls.mamba_ssm_step(kernel, tensors)
    if rule != "deltanet":
        raise Unserved("fla has a decoding chain for DeltaNet here; the other rules have no counterpart in it")
    return _fla_step(tensors)


def _fla_step(x: Tensors) -> Step:
    """What fla's DeltaNet layer does between its projections for one token: 3 convolutions, gate, rule, norm."""
    try:
        from fla.modules import RMSNorm, ShortConvolution
        from fla.ops.delta_rule import fused_recurrent_delta_rule
    except ImportError as missing:
        raise Unserved(f"fla cannot be imported: {missing}") from missing
    _, H, K, V = x["state"].shape
    device, dtype = x["x"].device, x["x"].dtype
    widths = (H * K, H * K, H * V)
    weights, inputs = x["conv_weight"].split(widths), x["x"].split(widths, -1)
    # fla keeps the last KERNEL_SIZE inputs, [B, D, KERNEL_SIZE]; the next step drops the oldest
    inputs_kept = torch.cat((torch.zeros_like(x["conv_state"][:, :1]), x["conv_state"]), 1).transpose(1, 2).contiguous()
    states = [part.contiguous() for part in inputs_kept.split(widths, 1)]
    tokens = [part.unsqueeze(1).contiguous() for part in inputs]
    convolutions = []
    for width, weight in zip(widths, weights, strict=True):
        module = ShortConvolution(hidden_size=width, kernel_size=KERNEL_SIZE, activation="silu").to(device, dtype)
        module.weight.data.copy_(weight.unsqueeze(1))
        convolutions.append(module)
    norm = RMSNorm(V, eps=1e-6, dtype=torch.float32).to(device)
    norm.weight.data.copy_(x["norm_weight"])
    state, logit = x["state"], x["beta_logit"].unsqueeze(1)
    cache = {}  # keeps the new state, which the op writes to a new tensor, until the next call

    def step() -> Tensor:
        q, k, v = (
            module(token, cache=past, output_final_state=True)[0].unflatten(-1, (H, -1))
            for module, token, past in zip(convolutions, tokens, states, strict=True)
        )
        o, cache["state"] = fused_recurrent_delta_rule(
            q, k, v, logit.sigmoid(), initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return norm(o)[:, 0]

    return step
