"""Forecast of a training recipe on a machine: `cost` and `measured` applied to settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from efla_lm.errors import UserError
from efla_lm.models import EflaConfig, count_parameters, flops_per_token
from efla_lm.parallel.activation_checkpointing import kind_of_checkpointing
from efla_lm.settings import TrainSettings
from efla_lm.training.batch_plan import Budget, plan_budget
from scripts.plan import cost, measured

GPUS_PER_NODE = 8  # assumed, where parallel=hsdp is to shard within a node, and for parallel=ddp


@dataclass(frozen=True)
class Forecast:
    """What a recipe needs and how long it takes."""

    config: EflaConfig
    parameters: int
    budget: Budget
    shards: int
    keeping: str  # activation checkpointing
    gpus: int
    gpu: str
    memory: cost.Memory
    fits: bool
    largest_micro_batch: int | None  # windows
    largest_memory: cost.Memory | None
    speed: measured.Speed
    duration: cost.Duration


def forecast(
    settings: TrainSettings,
    *,
    gpus: int,
    gpu: str,
    mfu: float | None = None,
    efficiency: float = 0.95,
    margin: float = 0.08,
    done_tokens: int = 0,
    rows: Sequence[measured.Row] | None = None,
) -> Forecast:
    """Work out a recipe on `gpus` devices of the kind `gpu` (see `cost.GPUS`); `done_tokens` lie behind already. rows:
    the measurements of speed to go by; None: those under docs/results.

    Raises:
        UserError: sizes that do not fit together, as train.py would say.
    """
    fields = asdict(settings.model)
    if fields["vocab_size"] is None:
        raise UserError("model.vocab_size: expected the number of tokens of the tokenizer, e.g. 32000")
    try:
        config = EflaConfig(**fields)
    except ValueError as error:
        raise UserError(f"model: {error}") from error
    budget = plan_budget(settings.train, settings.data.context, gpus)
    shards = shards_of(settings, gpus)
    kept = kind_of_checkpointing(settings.train.activation_checkpointing, settings.train.compile is not False)
    options = {
        "precision": settings.train.precision,
        "keeping": kept,
        "whole": whole_of(settings, gpus),
    }
    need = cost.memory(
        config,
        micro_tokens=budget.micro_batch * budget.context,
        shards=shards,
        micro_steps=budget.micro_steps,
        **options,  # type: ignore[arg-type]
    )
    device, windows = cost.GPUS[gpu], budget.windows // gpus
    largest = cost.largest_micro_batch(
        config, device, context=budget.context, windows=windows, margin=margin, shards=shards, **options
    )
    largest_need = largest and cost.memory(
        config,
        micro_tokens=largest * budget.context,
        shards=shards,
        micro_steps=windows // largest,
        **options,  # type: ignore[arg-type]
    )
    speed = measured.device_speed(
        {"attention": "transformer"}.get(config.mixer, config.mixer),
        settings.size.name,
        gpu,
        micro_tokens=budget.micro_batch * budget.context,
        context=budget.context,
        flops_per_token=flops_per_token(config, budget.context),
        mfu=mfu,
        checkpointing=kept == "full",
        rows=rows,
    )
    left = max(0, budget.total_tokens - done_tokens)
    return Forecast(
        config=config,
        parameters=count_parameters(config),
        budget=budget,
        shards=shards,
        keeping=kept,
        gpus=gpus,
        gpu=gpu,
        memory=need,
        fits=cost.fits(need, device, margin),
        largest_micro_batch=largest,
        largest_memory=largest_need or None,
        speed=speed,
        duration=cost.duration(left, speed.tokens_per_second, gpus, efficiency),
    )


def shards_of(settings: TrainSettings, gpus: int) -> int:
    """Devices that share one copy of the weights under `parallel`, as `distributed.build_mesh` has it."""
    parallel = settings.parallel
    if parallel.mode == "single" and gpus > 1:
        raise UserError(f"parallel.mode=single with gpus={gpus}: use parallel=fsdp or ddp")
    if parallel.mode == "hsdp":
        shards = parallel.shard or (gpus // parallel.replicate if parallel.replicate else min(gpus, GPUS_PER_NODE))
        replicas = parallel.replicate or gpus // max(shards, 1)
        if replicas * shards != gpus:
            raise UserError(
                f"parallel=hsdp: replicate={replicas} x shard={shards} = {replicas * shards}, but gpus={gpus}"
            )
        return shards
    return gpus if parallel.mode in ("auto", "fsdp") else 1


def whole_of(settings: TrainSettings, gpus: int) -> bool:
    """Whether devices hold the model without FSDP, as `distributed.holds_whole` has it."""
    if gpus == 1 and settings.parallel.mode in ("auto", "single"):
        return True
    return settings.parallel.mode == "ddp" and settings.train.cuda_graphs != "off" and gpus <= GPUS_PER_NODE


def clock(seconds: float) -> str:
    """`3 d 4 h`, `5 h 12 min`, `7 min`."""
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
