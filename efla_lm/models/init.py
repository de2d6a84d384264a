"""Initial values of every parameter: by name and seed for training, at random for transformers."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

THREADS = min(16, os.cpu_count() or 1)


def initial_value(
    module: nn.Module, name: str, shape: torch.Size, std: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw parameter `name` of `module` in fp32 on the CPU.

    Biases are zero, weights of linears and embeddings N(0, (std * init_scale)^2). A module with other parameters draws
    them in a method `initial_value(name, shape, std, generator)`.

    Raises:
        ValueError: for a parameter that neither covers.
    """
    if name == "bias":
        return torch.zeros(shape)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return torch.empty(shape).normal_(0.0, std * getattr(module, "init_scale", 1.0), generator=generator)
    if not hasattr(module, "initial_value"):
        raise ValueError(
            f"parameter {name!r} of {type(module).__name__} has no initial value: give the class a method "
            "initial_value(name, shape, std, generator)"
        )
    return module.initial_value(name, shape, std, generator)  # type: ignore[operator]


@torch.no_grad()
def initialise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter the value that (seed, parameter name) determines.

    Values are drawn in fp32 on the CPU from a generator per name, then copied into the parameter's dtype and device, or
    each rank's shard of it (DTensor): the same weights for any world size, and for a model that came from the meta
    device through `to_empty`. Tied weights are drawn once, and tied again if `to_empty` has untied them.

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

    # Each name has its own generator, which draws on one core: one after the other they take seconds.
    with ThreadPoolExecutor(THREADS) as pool:
        waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
        for entry in parameters.values():
            waiting.append((entry[3], pool.submit(draw, *entry)))
            if len(waiting) > THREADS:  # bounds the values held in memory
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
