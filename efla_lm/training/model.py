"""From settings to the model of a run: its config, how it is executed, and the sharded model with initial weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from efla_data.loader.token_file import TokenFile
from efla_kernels.backends import lacks_gpu, resolve_backend
from torch.distributed.device_mesh import DeviceMesh

from efla_lm.errors import UserError
from efla_lm.models import EflaConfig, EflaForCausalLM, initialise
from efla_lm.parallel.activation_checkpointing import checkpointed, checkpointing_kind
from efla_lm.parallel.compile_cache import tag_caches
from efla_lm.parallel.distributed import World, hold_whole, holds_whole, shard_model
from efla_lm.parallel.overlap import sum_in_backward
from efla_lm.settings import LoopSettings, ModelSettings, ParallelSettings


@dataclass(frozen=True)
class Execution:
    """How the model is computed. Another execution gives the same numbers up to rounding."""

    backend: str  # implementation of the mixer's op
    precision: str  # compute type
    compiled: bool  # whether torch.compile compiles the blocks
    checkpointing: str  # kind of activation checkpointing
    whole: bool  # whether each rank holds the whole model, without FSDP
    overlap: bool  # whether ranks sum their gradients in the backward pass (`efla_lm.parallel.overlap`)
    cuda_graphs: bool  # whether forward and backward are replayed from CUDA graphs


def build_config(model: ModelSettings, data: TokenFile) -> EflaConfig:
    """The model's config. Raises UserError for sizes that do not fit, DataError if the tokenizer has more ids than the
    model."""
    fields = asdict(model)
    if fields["vocab_size"] is None:
        fields["vocab_size"] = data.vocab_size
    tokenizer = data.manifest.tokenizer
    try:
        # the token before each document in training: generate() without a prompt begins with it
        start = tokenizer.bos_id if tokenizer.add_bos else tokenizer.eos_id
        config = EflaConfig(**fields, bos_token_id=start, eos_token_id=tokenizer.eos_id)
    except ValueError as error:
        raise UserError(f"model: {error}") from error
    data.check_vocabulary(config.vocab_size)
    return config


def backend_in_use(config: EflaConfig, device: torch.device) -> str:
    """The implementation that `model.backend` means on this device. Raises UserError if it does not serve the mixer or
    the device."""
    op = config.rule.op
    if op is None:
        if config.backend not in ("auto", "torch"):
            raise UserError(f"model.backend={config.backend}: attention has torch's SDPA only; set auto or torch")
        return "torch SDPA"
    if lacks_gpu(config.backend, device):
        raise UserError(f"model.backend={config.backend} needs a GPU, the device is {device}: set auto or torch")
    try:
        return resolve_backend(config.backend, device, op)
    except ValueError as error:
        raise UserError(f"model.backend: {error}") from error


def plan_execution(
    train: LoopSettings, parallel: ParallelSettings, packing: str, config: EflaConfig, world: World
) -> Execution:
    """What the settings mean on these devices; packing: `data.packing`. Raises UserError for a setting that cannot be
    had here, and for parallel.overlap=false where it has no effect."""
    backend = backend_in_use(config, world.device)
    compiled = _compiles(train.compile, packing, backend, config.mixer, world.device)
    whole = holds_whole(parallel.mode, world, train.cuda_graphs)
    sums_itself = whole and world.size > 1
    if not parallel.overlap and not sums_itself:
        reason = "one process runs" if world.size == 1 else "FSDP sums the gradients here, in its own way"
        raise UserError(
            f"parallel.overlap=false belongs to parallel=ddp with several processes on one machine and "
            f"train.cuda_graphs not off, but {reason}: leave parallel.overlap out"
        )
    can_record = world.device.type == "cuda" and whole
    if train.cuda_graphs == "on" and not can_record:
        raise UserError(
            "train.cuda_graphs=on needs CUDA devices, and one process or parallel=ddp on one machine: set it to auto"
        )
    return Execution(
        backend=backend,
        precision=train.precision,
        compiled=compiled,
        checkpointing=checkpointing_kind(train.activation_checkpointing, compiled),
        whole=whole,
        overlap=sums_itself and parallel.overlap,
        cuda_graphs=can_record and train.cuda_graphs != "off",
    )


def _compiles(setting: bool | None, packing: str, backend: str, mixer: str, device: torch.device) -> bool:
    """Whether blocks are compiled: `train.compile`, or on a GPU."""
    # these two backends read the boundaries of packed documents on the host
    on_host = packing == "documents" and backend in ("torch", "reference")
    if setting and on_host:
        raise UserError(
            f"train.compile=true with data.packing=documents: the backend {backend} of model.mixer={mixer} cannot be "
            "compiled for packed documents; set train.compile=false"
        )
    return device.type == "cuda" and not on_host if setting is None else setting


def build_model(config: EflaConfig, execution: Execution, world: World, mesh: DeviceMesh, seed: int) -> EflaForCausalLM:
    """The model with its initial weights, which do not depend on the number of processes. No device ever holds the
    whole of a sharded model."""
    with torch.device("meta"):
        model = EflaForCausalLM(config)
    blocks = list(model.model.layers)
    if execution.compiled:
        tag_caches()
    for block in blocks:
        block.forward = checkpointed(block.forward, execution.checkpointing)
        if execution.compiled:
            # only `forward`: the hooks of FSDP stay outside of the compiled graph, which all blocks share
            block.forward = torch.compile(block.forward, fullgraph=True)
    if execution.whole:
        hold_whole(model, execution.precision)
    else:
        shard_model(model, blocks, mesh, execution.precision)
    model.to_empty(device=world.device)
    initialise(model, seed)
    if execution.overlap:
        sum_in_backward(model, blocks)
    return model.train()
