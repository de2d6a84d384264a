"""Initial values of every parameter, written once: by name and seed for training, at random for transformers."""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from efla_lm.models.layers import Decay, ShortConvolution
from efla_lm.models.mixers.mamba2 import Mamba2Mixer
from efla_lm.models.norm_linear import GatedRMSNorm, RMSNorm

# A = exp(A_log) starts uniform over (low, high]: never log 0. Gated DeltaNet and Mamba-2 as published.
A_RANGE: dict[type[nn.Module], tuple[float, float]] = {Decay: (0.0, 16.0), Mamba2Mixer: (1.0, 16.0)}
# Steps dt of the decay start log-uniform between these, as in Mamba-2 and Gated DeltaNet.
DT_RANGE = (1e-3, 1e-1)
DT_FLOOR = 1e-4
DRAWING = min(16, os.cpu_count() or 1)  # threads that draw


def initial_value(
    module: nn.Module, name: str, shape: torch.Size, std: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw parameter `name` of `module` in fp32 on the CPU.

    Linear, embedding and convolution weights N(0, std^2), but for Mamba-2, as published: its taps uniform in
    +-1/sqrt(W), its residual outputs `init_scale` = 1/sqrt(blocks) smaller. (Small taps train the delta rules clearly
    faster than uniform ones, and Mamba-2 equally well.) Norms and D one; biases zero; A uniform over `A_RANGE`; dt_bias
    the inverse softplus of a log-uniform step.

    Raises:
        ValueError: for a parameter that has no rule.
    """
    if isinstance(module, (RMSNorm, GatedRMSNorm)) or name == "D":
        return torch.ones(shape)
    if name == "bias":
        return torch.zeros(shape)
    if isinstance(module, ShortConvolution) and module.uniform_init:
        bound = shape[-1] ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if isinstance(module, (nn.Linear, nn.Embedding, ShortConvolution)):
        return torch.empty(shape).normal_(0.0, std * getattr(module, "init_scale", 1.0), generator=generator)
    uniform = torch.rand(shape, generator=generator)  # in [0, 1)
    if name == "A_log":
        low, high = A_RANGE[Decay if isinstance(module, Decay) else Mamba2Mixer]
        return (high - (high - low) * uniform).log()
    if name == "dt_bias":
        log_low, log_high = math.log(DT_RANGE[0]), math.log(DT_RANGE[1])
        dt = (log_low + (log_high - log_low) * uniform).exp().clamp(min=DT_FLOOR)
        return dt + (-torch.expm1(-dt)).log()  # softplus^-1(dt)
    raise ValueError(f"no initial value is defined for parameter {name!r} of {type(module).__name__}")


@torch.no_grad()
def initialise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter the value that (seed, parameter name) determines.

    Values are drawn in fp32 on the CPU from a generator per name, then copied into the parameter's dtype and device, or
    each rank's shard of it (DTensor): the same weights for any world size, and for a model that came from the meta
    device through `to_empty`. Tied weights are drawn once, and tied again where `to_empty` has parted them.

    Raises:
        ValueError: if parameters are still on the meta device.
    """
    config = model.config
    if config.tie_word_embeddings:
        model.tie_weights()
    parameters: dict[int, tuple[str, nn.Module, str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full_name = canonical_name(f"{prefix}.{name}" if prefix else name)
            if parameter.is_meta:
                raise ValueError(f"parameter {full_name} is on the meta device; call model.to_empty(device=...) first")
            parameters.setdefault(id(parameter), (full_name, module, name, parameter))

    def draw(full_name: str, module: nn.Module, name: str, parameter: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(name_seed(seed, full_name))
        return initial_value(module, name, parameter.shape, config.initializer_range, generator)

    # a generator draws on one core, and there is one for each name: seconds for a large model, unless side by side
    with ThreadPoolExecutor(DRAWING) as pool:
        waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
        for entry in parameters.values():
            waiting.append((entry[3], pool.submit(draw, *entry)))
            if len(waiting) > DRAWING:  # no more in memory than are drawn at once
                parameter, value = waiting.popleft()
                copy_value(parameter, value.result())
        for parameter, value in waiting:
            copy_value(parameter, value.result())


def canonical_name(name: str) -> str:
    """Parameter name without what wrappers (checkpointing, compile) insert."""
    for inserted in ("_checkpoint_wrapped_module.", "_orig_mod."):
        name = name.replace(inserted, "")
    return name


def name_seed(seed: int, name: str) -> int:
    """63 bits that depend on the seed and the whole name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def copy_value(parameter: Tensor, value: Tensor) -> None:
    """Copy a full tensor into a parameter, or its shard here into a sharded one; no communication."""
    value = value.to(device=parameter.device, dtype=parameter.dtype)
    if isinstance(parameter, DTensor):
        value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(value)
