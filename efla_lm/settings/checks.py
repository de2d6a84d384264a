"""Checks of the values of training settings that need neither processes nor data.

Nothing here changes a setting. Every message names the key, what was expected, what came, and what to do.
"""

from efla_lm.errors import UserError
from efla_lm.settings.schema import (
    DataSettings,
    LiveEvalSettings,
    LoopSettings,
    OptimSettings,
    ParallelSettings,
    PrepareSettings,
    ScheduleSettings,
    TrainSettings,
)


def check_train(settings: TrainSettings) -> None:
    """All checks of a training run. Raises UserError."""
    name = settings.name
    if name is not None and (not name.strip("/. ") or name.startswith("/") or ".." in name.split("/")):
        raise UserError(f"name: got {name!r}, expected a folder name under runs_dir={settings.runs_dir}")
    if not 0 <= settings.seed < 1 << 63:
        raise UserError(f"seed: got {settings.seed}, expected 0 or more, below 2^63")
    _positive("profile", settings.profile)
    check_data(settings.data)
    check_loop(settings.train, settings.data.context)
    check_optim(settings.optim)
    check_schedule(settings.schedule)
    check_parallel(settings.parallel)
    check_live_eval(settings.eval)


def check_loop(loop: LoopSettings, context: int) -> None:
    """Lengths, batch and intervals of the loop."""
    _exactly_one("train.tokens", loop.tokens, "train.steps", loop.steps)
    _exactly_one("train.micro_tokens", loop.micro_tokens, "train.micro_batch", loop.micro_batch)
    for name in (
        "tokens", "steps", "batch_tokens", "micro_tokens", "micro_batch", "log_every", "validate_every",
        "validate_batches", "save_every", "keep_checkpoints", "stop_at", "max_skipped_steps",
    ):  # fmt: skip
        _positive(f"train.{name}", getattr(loop, name))
    if loop.clip_norm is not None and loop.clip_norm <= 0:
        raise UserError(f"train.clip_norm: got {loop.clip_norm}, expected more than 0 (null: no clipping)")
    if loop.batch_tokens % context:
        raise UserError(
            f"train.batch_tokens: got {loop.batch_tokens}, expected a multiple of data.context={context}; "
            f"the nearest is {_round(loop.batch_tokens, context)}"
        )
    if loop.micro_tokens is not None and loop.micro_tokens < context:
        raise UserError(
            f"train.micro_tokens: got {loop.micro_tokens}, expected at least one window of data.context={context}"
        )


def check_data(data: DataSettings) -> None:
    """What can be said about a corpus without looking at it."""
    _exactly_one("data.heldout_fraction", data.heldout_fraction, "data.heldout_sources", data.heldout_sources)
    if data.heldout_fraction is not None and not 0 <= data.heldout_fraction < 1:
        raise UserError(f"data.heldout_fraction: got {data.heldout_fraction}, expected from 0 to below 1, e.g. 0.01")
    for name in ("context", "vocab_size", "max_tokens", "max_documents"):
        _positive(f"data.{name}", getattr(data, name))
    if data.sample == "documents" and data.max_tokens is None:
        raise UserError("data.sample=documents: set data.max_tokens to the size of the sample, e.g. 8_000_000_000")
    if len(data.weights) != len(data.mixture) or any(weight <= 0 for weight in data.weights):
        raise UserError(
            f"data.weights: got {data.weights}, expected {len(data.mixture)} numbers above 0, one for each folder of "
            f"data.mixture={data.mixture}"
        )
    if data.packing == "documents" and data.mask_boundaries:
        raise UserError(
            "data.mask_boundaries=true belongs to data.packing=stream: packed documents predict none but their own "
            "tokens; set it to false"
        )
    if data.packing == "stream" and data.max_documents is not None:
        raise UserError(f"data.max_documents={data.max_documents} belongs to data.packing=documents; set it to null")


def check_prepare(settings: PrepareSettings) -> None:
    """All checks of a preparation. Raises UserError."""
    _positive("processes", settings.processes)
    check_data(settings.data)


def check_optim(optim: OptimSettings) -> None:
    """Ranges of AdamW's constants."""
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise UserError(f"optim.betas: got {optim.betas}, expected two numbers from 0 to below 1, e.g. [0.9,0.95]")
    if optim.eps <= 0:
        raise UserError(f"optim.eps: got {optim.eps}, expected more than 0, e.g. 1e-8")
    if optim.weight_decay < 0:
        raise UserError(f"optim.weight_decay: got {optim.weight_decay}, expected 0 or more")


def check_schedule(schedule: ScheduleSettings) -> None:
    """Rates, and the keys that belong to one kind only."""
    _exactly_one("schedule.warmup_updates", schedule.warmup_updates, "schedule.warmup_tokens", schedule.warmup_tokens)
    for name in ("warmup_updates", "warmup_tokens", "initial", "final"):
        value = getattr(schedule, name)
        if value is not None and value < 0:
            raise UserError(f"schedule.{name}: got {value}, expected 0 or more")
    if schedule.peak <= 0:
        raise UserError(f"schedule.peak: got {schedule.peak}, expected a learning rate above 0, e.g. 3e-4")
    _belongs("schedule.final", schedule.final, schedule.kind in ("cosine", "wsd"), schedule.kind)
    _belongs("schedule.decay_fraction", schedule.decay_fraction, schedule.kind == "wsd", schedule.kind)
    if schedule.decay_fraction is not None and not 0 < schedule.decay_fraction <= 1:
        raise UserError(f"schedule.decay_fraction: got {schedule.decay_fraction}, expected above 0 and at most 1")


def check_parallel(parallel: ParallelSettings) -> None:
    """Keys that belong to one mode only."""
    for name in ("replicate", "shard", "world_size"):
        value = getattr(parallel, name)
        _positive(f"parallel.{name}", value)
        if name != "world_size" and value is not None and parallel.mode != "hsdp":
            raise UserError(
                f"parallel.{name}: got {value} with parallel.mode={parallel.mode}, which sets its own mesh; "
                f"use parallel=hsdp, or parallel.{name}=null"
            )
    if parallel.mode == "single" and parallel.world_size not in (None, 1):
        raise UserError(f"parallel.world_size: got {parallel.world_size} with parallel.mode=single; use ddp or fsdp")


def check_live_eval(live: LiveEvalSettings) -> None:
    """An interval and something to do at it, or neither."""
    _positive("eval.every", live.every)
    _positive("eval.limit", live.limit)
    if (live.every is None) != (not live.tasks):
        raise UserError(
            f"eval.every={live.every} with eval.tasks={live.tasks}: give both, e.g. eval.every=1000 "
            "eval.tasks=[lambada_openai,hellaswag], or neither"
        )


def _exactly_one(first: str, a: object, second: str, b: object) -> None:
    if a is not None and b is not None:
        raise UserError(f"{first}={a} and {second}={b} say the same thing twice; set one of them to null")
    if a is None and b is None:
        raise UserError(f"{first} and {second}: expected exactly one, got neither; give one of them a value")


def _positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UserError(f"{name}: got {value}, expected 1 or more")


def _belongs(name: str, value: object, wanted: bool, kind: str) -> None:
    if wanted and value is None:
        raise UserError(f"{name}: got null, expected a number for schedule.kind={kind}")
    if not wanted and value is not None:
        raise UserError(f"{name}: got {value}, but schedule.kind={kind} has no such value; set {name}=null")


def _round(value: int, unit: int) -> int:
    return max(unit, round(value / unit) * unit)
