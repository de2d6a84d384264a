"""Forecast of a training recipe on a machine: `cost` and `measured` applied to settings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from efla_lm.errors import UserError
from efla_lm.models import EflaConfig, count_parameters, flops_per_token
from efla_lm.models.rules import RULES
from efla_lm.parallel.activation_checkpointing import kind_of_checkpointing
from efla_lm.settings import TrainSettings
from efla_lm.training.batch_plan import Budget, plan_budget
from scripts.plan import cost, measured
from scripts.plan.cost import GPUS_PER_MACHINE


@dataclass(frozen=True)
class Forecast:
    """What a recipe needs and how long it takes."""

    config: EflaConfig
    parameters: int
    budget: Budget
    shards: int
    checkpointing: str
    gpus: int
    gpu: str
    memory: cost.Memory
    fits: bool
    largest_micro_batch: int | None  # sequences
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
    network: float = 50.0,
    margin: float = 0.08,
    done_tokens: int = 0,
    rows: Sequence[measured.Row] | None = None,
) -> Forecast:
    """Work out a recipe on `gpus` devices of the kind `gpu` (see `cost.GPUS`) of which `done_tokens` are done.

    rows: the measurements of speed to go by; None: those under docs/results.

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
    kind = kind_of_checkpointing(settings.train.activation_checkpointing, settings.train.compile is not False)
    options: dict[str, Any] = {
        "shards": shards,
        "precision": settings.train.precision,
        "checkpointing": kind,
        "whole": whole_of(settings, gpus),
    }
    device, sequences = cost.GPUS[gpu], budget.windows // gpus

    def memory(micro_batch: int) -> cost.Memory:
        tokens, micro_steps = micro_batch * budget.context, sequences // micro_batch
        return cost.memory(config, micro_tokens=tokens, micro_steps=micro_steps, **options)

    largest = cost.largest_micro_batch(
        config, device, context=budget.context, windows=sequences, margin=margin, **options
    )
    micro_tokens = budget.micro_batch * budget.context
    speed = measured.device_speed(
        RULES[config.mixer].option,
        settings.size.name,
        gpu,
        micro_tokens=micro_tokens,
        context=budget.context,
        flops_per_token=flops_per_token(config, budget.context),
        mfu=mfu,
        checkpointing=kind == "full",
        rows=rows,
    )
    parameters = count_parameters(config)
    sent = cost.network_bytes(parameters, gpus, shards, budget.micro_steps)
    step = budget.micro_steps * micro_tokens / speed.tokens_per_second
    left, share = max(0, budget.total_tokens - done_tokens), cost.network_share(sent, step, network)
    need = memory(budget.micro_batch)
    return Forecast(
        config=config,
        parameters=parameters,
        budget=budget,
        shards=shards,
        checkpointing=kind,
        gpus=gpus,
        gpu=gpu,
        memory=need,
        fits=cost.fits(need, device, margin),
        largest_micro_batch=largest,
        largest_memory=memory(largest) if largest else None,
        speed=speed,
        duration=cost.duration(left, speed.tokens_per_second, gpus, efficiency, share),
    )


def hsdp_instead(settings: TrainSettings, found: Forecast, **options: Any) -> Forecast | None:
    """The forecast with `parallel=hsdp`, where the state now spans machines and a copy for each machine fits."""
    if found.shards <= GPUS_PER_MACHINE or found.gpus % GPUS_PER_MACHINE:
        return None
    other = copy.deepcopy(settings)
    other.parallel.mode, other.parallel.shard, other.parallel.replicate = "hsdp", GPUS_PER_MACHINE, None
    instead = forecast(other, **options)
    return instead if instead.fits else None


def shards_of(settings: TrainSettings, gpus: int) -> int:
    """Devices that share one copy of the weights under `parallel`, as `distributed.build_mesh` has it."""
    parallel = settings.parallel
    if parallel.mode == "single" and gpus > 1:
        raise UserError(f"parallel.mode=single with gpus={gpus}: use parallel=fsdp or ddp")
    if parallel.mode == "hsdp":
        shards = parallel.shard or (gpus // parallel.replicate if parallel.replicate else min(gpus, GPUS_PER_MACHINE))
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
    return settings.parallel.mode == "ddp" and settings.train.cuda_graphs != "off" and gpus <= GPUS_PER_MACHINE


def clock(seconds: float) -> str:
    """`3 d 4 h`, `5 h 12 min`, `7 min`."""
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
