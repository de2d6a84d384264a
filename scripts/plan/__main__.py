"""What a training recipe needs and how long it takes:

    python -m scripts.plan model=efla size=1b3 gpus=8 gpu=a100-80gb

All keys of train.py apply. The formulae are in `scripts/plan/cost.py`; every number that is assumed and not
measured is called so. Exit code 1 where the recipe does not fit: then no time is given.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from efla_lm.settings import entry
from scripts.plan import cost
from scripts.plan.forecast import Forecast, clock, forecast, hsdp_instead
from scripts.plan.settings import PlanSettings


@entry("plan", PlanSettings)
def main(settings: PlanSettings) -> int:
    """Forecast memory per device, speed, days and GPU-hours of a recipe, and the largest micro-batch that fits."""
    options: dict[str, Any] = {
        name: getattr(settings, name) for name in ("gpus", "gpu", "mfu", "efficiency", "network", "margin")
    }
    found = forecast(settings, **options)
    lines = recipe_lines(found, settings)
    if found.fits:
        lines |= time_lines(found, settings)
    if instead := hsdp_instead(settings, found, **options):
        rate = f"{instead.duration.tokens_per_second:,.0f} tokens/s"
        lines["beside it"] = f"parallel=hsdp, one copy of the state for each machine: {rate}, {need(instead)}"
    table = Table(title=f"{settings.size.name} {found.config.mixer}", title_justify="left", show_header=False)
    for name, text in lines.items():
        table.add_row(name, text)
    Console(highlight=False, width=140).print(table)
    if found.fits:
        return 0
    largest = found.largest_micro_batch
    more = "set train.activation_checkpointing=full, or share the state between more GPUs (parallel=fsdp)"
    mend = f"set train.micro_batch={largest}" if largest else more
    print(f"error: {need(found)} a device do not fit on {found.gpu}: {mend}", file=sys.stderr)
    return 1


def need(found: Forecast) -> str:
    """`52.8 GiB`."""
    return f"{found.memory.peak_gib:.1f} GiB"


def recipe_lines(found: Forecast, settings: PlanSettings) -> dict[str, str]:
    """What the table says about the recipe and its memory."""
    budget, device = found.budget, cost.GPUS[found.gpu]
    free = f"{(1 - settings.margin) * device.memory_gib:.1f} (margin={settings.margin:g} left free)"
    devices = f"{found.gpus} GPU{'s' * (found.gpus > 1)}"
    if found.largest_micro_batch is None or found.largest_memory is None:
        largest = (
            "none: not even one sequence fits; more GPUs to share the state, or train.activation_checkpointing=full"
        )
    else:
        tokens = found.largest_micro_batch * budget.context
        largest = f"{found.largest_micro_batch} sequences = {tokens:,} tokens, {found.largest_memory.peak_gib:.1f} GiB"
    micro_batches = f"{budget.micro_steps} micro-batches x {budget.micro_batch} sequences of {budget.context:,} tokens"
    return {
        "parameters": f"{found.parameters:,}",
        "recipe": f"{budget.steps:,} steps of {budget.batch_tokens:,} = {budget.total_tokens:,} tokens",
        "batch": f"{devices} x {micro_batches}",
        "device": f"{found.gpus} x {found.gpu}, one copy of weights and optimiser for every {found.shards}",
        "memory per device": f"{need(found)} at the peak, of {free}: {'fits' if found.fits else 'DOES NOT FIT'}",
        "  of it, GiB": ", ".join(f"{name} {gib:.2f}" for name, gib in found.memory.parts_gib().items()),
        "activation checkpointing": found.checkpointing,
        "largest micro-batch that fits": largest,
    }


def time_lines(found: Forecast, settings: PlanSettings) -> dict[str, str]:
    """What the table says about speed and time."""
    time, one = found.duration, f"{found.speed.tokens_per_second:,.0f}"
    together = f" = {found.gpus} x {one} x {settings.efficiency:g} (efficiency=, assumed)" if found.gpus > 1 else ""
    if time.network_share < 1:
        together += f" x {time.network_share:.2f} (network={settings.network:g} GB/s between machines, assumed)"
    lines = {
        "tokens/s of a device": f"{one} ({found.speed.source})",
        "tokens/s": f"{time.tokens_per_second:,.0f}{together}",
        "time": f"{clock(time.seconds)} = {time.days:.2f} days",
        "GPU-hours": f"{time.gpu_hours:,.0f}",
    }
    if settings.price is not None:
        lines["price"] = f"{time.gpu_hours * settings.price:,.0f} at {settings.price:g} per GPU-hour"
    return lines


if __name__ == "__main__":
    main()
