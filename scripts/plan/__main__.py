"""What a training recipe needs and how long it takes:

    python -m scripts.plan model=efla size=1b3 gpus=8 gpu=a100-80gb

All keys of train.py apply. The formulae are in `scripts/plan/cost.py`; every number that is assumed and not
measured is called so.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from efla_lm.settings import entry
from scripts.plan import cost
from scripts.plan.forecast import Forecast, clock, forecast
from scripts.plan.settings import PlanSettings


@entry("plan", PlanSettings)
def main(settings: PlanSettings) -> int:
    """Forecast memory per device, speed, days and GPU-hours of a recipe, and the largest micro-batch that fits."""
    found = forecast(
        settings,
        gpus=settings.gpus,
        gpu=settings.gpu,
        mfu=settings.mfu,
        efficiency=settings.efficiency,
        margin=settings.margin,
    )
    table = Table(title=f"{settings.size.name} {found.config.mixer}", title_justify="left", show_header=False)
    for name, text in lines(found, settings).items():
        table.add_row(name, text)
    Console(highlight=False, width=140).print(table)
    return 0


def lines(found: Forecast, settings: PlanSettings) -> dict[str, str]:
    """What the table says."""
    budget, time = found.budget, found.duration
    device = cost.GPUS[found.gpu]
    free = f"{(1 - settings.margin) * device.memory_gib:.1f} (margin={settings.margin:g} left free)"
    parts = ", ".join(f"{name} {gib:.2f}" for name, gib in found.memory.parts_gib().items())
    verdict = "fits" if found.fits else "DOES NOT FIT"
    devices, one = f"{found.gpus} GPU{'s' * (found.gpus > 1)}", f"{found.speed.tokens_per_second:,.0f}"
    together = f" = {found.gpus} x {one} x {settings.efficiency:g} (efficiency=, assumed)" if found.gpus > 1 else ""
    if found.largest_micro_batch is None or found.largest_memory is None:
        largest = "none: not even one window fits; more GPUs to share the state, or train.activation_checkpointing=full"
    else:
        tokens = found.largest_micro_batch * budget.context
        largest = f"{found.largest_micro_batch} windows = {tokens:,} tokens, {found.largest_memory.peak_gib:.1f} GiB"
    cut = f"{devices} x {budget.micro_steps} micro-batches x {budget.micro_batch} windows of {budget.context:,} tokens"
    report = {
        "parameters": f"{found.parameters:,}",
        "recipe": f"{budget.steps:,} updates of {budget.batch_tokens:,} = {budget.total_tokens:,} tokens",
        "batch": cut,
        "device": f"{found.gpus} x {found.gpu}, one copy of weights and optimiser for every {found.shards}",
        "memory per device": f"{found.memory.peak_gib:.1f} GiB at the peak, of {free}: {verdict}",
        "  of it, GiB": parts,
        "activation checkpointing": found.keeping,
        "largest micro-batch that fits": largest,
        "tokens/s of a device": f"{one} ({found.speed.source})",
        "tokens/s": f"{time.tokens_per_second:,.0f}{together}",
        "time": f"{clock(time.seconds)} = {time.days:.2f} days",
        "GPU-hours": f"{time.gpu_hours:,.0f}",
    }
    if settings.price is not None:
        report["price"] = f"{time.gpu_hours * settings.price:,.0f} at {settings.price:g} per GPU-hour"
    return report


if __name__ == "__main__":
    main()
