"""From settings to the parts of a run: data, model config, sharded model, and what identifies the run."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from efla_data.loader.sequences import Sequences
from efla_data.loader.token_file import TokenFile
from efla_kernels.backends import lacks_gpu, resolve_backend
from torch.distributed.device_mesh import DeviceMesh

from efla_lm.errors import UserError
from efla_lm.models import EflaConfig, EflaForCausalLM, initialise
from efla_lm.parallel.activation_checkpointing import keeping, kind_of_checkpointing
from efla_lm.parallel.compile_cache import tag_caches
from efla_lm.parallel.cuda_graphs import GraphedPasses, run_eagerly
from efla_lm.parallel.distributed import World, hold_whole, holds_whole, shard_model
from efla_lm.parallel.overlap import sum_in_backward
from efla_lm.run.checkpoint import check_identity, checkpoints_in, find_checkpoint
from efla_lm.run.meta import read_meta
from efla_lm.run.tokenizer_files import copy_tokenizer
from efla_lm.run.verify import fault_in
from efla_lm.settings import TrainSettings
from efla_lm.training import corpus
from efla_lm.training.batch_plan import Budget
from efla_lm.training.step import Passes

if TYPE_CHECKING:
    from efla_lm.evaluation.live import LiveEvaluation

# Fields of the config that may differ between launches of one run: how it is computed, not what.
FREE_FIELDS = {"backend", "initializer_range", "max_position_embeddings"}


def build_config(settings: TrainSettings, data: TokenFile) -> EflaConfig:
    """The model's config. Raises UserError for sizes that do not fit, DataError if the tokenizer is wider than it."""
    fields = asdict(settings.model)
    if fields["vocab_size"] is None:
        fields["vocab_size"] = data.vocab_size
    tokenizer = data.manifest.tokenizer
    try:
        # What stood before a document in training: generate() without a prompt begins with it.
        start = tokenizer.bos_id if tokenizer.add_bos else tokenizer.eos_id
        config = EflaConfig(**fields, bos_token_id=start, eos_token_id=tokenizer.eos_id)
    except ValueError as error:
        raise UserError(f"model: {error}") from error
    data.check_vocabulary(config.vocab_size)
    return config


def backend_in_use(config: EflaConfig, device: torch.device) -> str:
    """The implementation that `model.backend` means on this device. Raises UserError if it does not serve the mixer, or
    not there."""
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


def build_model(settings: TrainSettings, config: EflaConfig, world: World, mesh: DeviceMesh) -> EflaForCausalLM:
    """The model with its initial weights, the same for any number of processes; sharded, it is never whole on a
    device."""
    with torch.device("meta"):
        model = EflaForCausalLM(config)
    compiled = compiles(settings, backend_in_use(config, world.device), world.device)
    kind = kind_of_checkpointing(settings.train.activation_checkpointing, compiled)
    if compiled:
        tag_caches()
    for block in model.model.layers:
        block.forward = keeping(block.forward, kind)
        if compiled:
            # the forward alone: the hooks of sharding stay outside of the compiled graph, one for all blocks
            block.forward = torch.compile(block.forward, fullgraph=True)
    whole = holds_whole(settings.parallel.mode, world, settings.train.cuda_graphs)
    if whole:
        hold_whole(model, settings.train.precision)
    else:
        shard_model(model, list(model.model.layers), mesh, settings.train.precision)
    model.to_empty(device=world.device)
    initialise(model, settings.seed)
    if sums_in_backward(settings, world):
        sum_in_backward(model, list(model.model.layers))
    return model.train()


def sums_in_backward(settings: TrainSettings, world: World) -> bool:
    """Whether ranks sum their gradients in the backward pass, by `efla_lm.parallel.overlap`. Raises UserError where
    parallel.overlap=false has nothing to act on."""
    possible = world.size > 1 and holds_whole(settings.parallel.mode, world, settings.train.cuda_graphs)
    if not settings.parallel.overlap and not possible:
        how = "one process runs" if world.size == 1 else "FSDP sums the gradients here, in its own way"
        raise UserError(
            f"parallel.overlap=false belongs to parallel=ddp with several processes on one machine and "
            f"train.cuda_graphs not off, but {how}: leave parallel.overlap out"
        )
    return possible and settings.parallel.overlap


def build_passes(settings: TrainSettings, world: World) -> Passes:
    """How forward and backward are run (train.cuda_graphs). Raises UserError where graphs cannot be recorded, and where
    parallel.overlap=false has nothing to act on."""
    sums_in_backward(settings, world)
    wanted = settings.train.cuda_graphs
    possible = world.device.type == "cuda" and holds_whole(settings.parallel.mode, world, wanted)
    if wanted == "on" and not possible:
        raise UserError(
            "train.cuda_graphs=on needs CUDA devices, and one process or parallel=ddp on one machine: set it to auto"
        )
    return GraphedPasses() if possible and wanted != "off" else run_eagerly


def compiles(settings: TrainSettings, backend: str, device: torch.device) -> bool:
    """Whether blocks are compiled: train.compile, or on a GPU. Raises UserError where they cannot be."""
    # these two read the boundaries of packed documents on the host
    on_host = settings.data.packing == "documents" and backend in ("torch", "reference")
    if settings.train.compile and on_host:
        raise UserError(
            f"train.compile=true with data.packing=documents: the backend {backend} of model.mixer="
            f"{settings.model.mixer} cannot be compiled for packed documents; set train.compile=false"
        )
    return device.type == "cuda" and not on_host if settings.train.compile is None else settings.train.compile


def live_evaluation(settings: TrainSettings, tokens: TokenFile, budget: Budget, world: World) -> LiveEvaluation | None:
    """The tasks that are evaluated during training, or None without eval.every. Raises UserError for one that cannot
    be had."""
    if settings.eval.every is None:
        return None
    from efla_lm.evaluation.live import LiveEvaluation  # lm-eval takes seconds to import

    micro_tokens = budget.micro_batch * budget.context
    return LiveEvaluation(
        world, settings.eval, tokens.tokenizer_dir, Path(settings.data.dir), budget.context, micro_tokens
    )


def identity(settings: TrainSettings, config: EflaConfig, windows: Sequences) -> dict[str, Any]:
    """What a continued run must share with its checkpoint, by the name of the key that sets it."""
    model = {f"model.{name}": getattr(config, name) for name in asdict(settings.model) if name not in FREE_FIELDS}
    batch = {"train.batch_tokens": settings.train.batch_tokens, "seed": settings.seed}
    return model | corpus.identity(settings.data, windows) | batch


def find_resume(settings: TrainSettings, ours: dict[str, Any], *, locked: bool) -> Path | None:
    """The checkpoint to start from (`resume`, `name`), or None to start from nothing; it belongs to the same run.

    locked: whether this launch holds the run's lock. What counts is found then, with every byte checked: another launch
    may have saved, and left, since a look before. That one is silent and goes by sizes: it refuses what cannot be meant
    before anything is made or written.

    Raises UserError if there is none where one was named, if it differs in a key of `identity`, or if the run directory
    already holds later checkpoints than it, which the next resume=auto would take instead.
    """
    run_dir = Path(settings.runs_dir) / settings.name if settings.name else None
    if settings.resume == "never":
        return None
    automatic = settings.resume == "auto"
    if automatic and (run_dir is None or not checkpoints_in(run_dir)):
        return None
    place = run_dir if automatic and run_dir else Path(settings.resume)
    found = find_checkpoint(place) if locked else find_checkpoint(place, lambda message: None, fault_in)
    meta = read_meta(found)
    check_identity(found, meta.identity, ours)
    for other in checkpoints_in(run_dir) if run_dir and not automatic else []:  # else all later ones are damaged
        if fault_in(other) is None and read_meta(other).step > meta.step:
            raise UserError(f"{other} is later than {found}: remove it to go back, or choose a new name=")
    return found


def keep_tokenizer(data: TokenFile, run_dir: Path) -> None:
    """Copy the tokenizer of the token files into the run, where checkpoints point to.

    Checkpoints keep the one that is there; without any, it may be that of other data, from a launch that saved nothing.
    """
    target = run_dir / "tokenizer"
    if target.exists() and checkpoints_in(run_dir):
        return
    partial = run_dir / "tokenizer.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    copy_tokenizer(data.tokenizer_dir, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
