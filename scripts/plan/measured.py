"""Speed of one device: from measurements under docs/results where they apply, else from a stated assumption.

A file `throughput_*.json` holds rows (a list, or under `rows`) with `model, size, impl, batch, tokens, gpus,
tokens_per_second, mfu`: batch windows of `tokens` positions on each device, speed over all `gpus`; `impl` of ours is
`efla_lm` (or `ours`). `mfu_with_mixing` counts FLOPs as train.py does and goes before `mfu`; rows with `options` are
of other recipes than the defaults and are left out. The device is in the row or the file (`gpu`), else in the file's
name (`throughput_h200.json`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.parallel.gpus import GPUS

Row = dict[str, Any]
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
OURS = ("efla_lm", "efla-lm", "ours")
ASSUMED_MFU = 0.40


@dataclass(frozen=True)
class Speed:
    """Tokens per second of one device, and where the number comes from."""

    tokens_per_second: float
    source: str
    is_measured: bool


def device_speed(
    model: str,
    size: str,
    gpu: str,
    *,
    micro_tokens: int,
    context: int,
    flops_per_token: float,
    mfu: float | None = None,
    checkpointing: bool = False,
    rows: Sequence[Row] | None = None,
    folder: Path = RESULTS,
) -> Speed:
    """Speed of `model` at `size` on a device that takes `micro_tokens` at once, in windows of `context`.

    In this order: the given `mfu`; a measurement of this model, size and GPU (on one GPU before several, of the nearest
    micro-batch and context; of another context its MFU with the mixing counted, where the row has it); the MFU that
    this model and size reached on another GPU; an assumed MFU. Activation checkpointing computes the forward pass
    twice, 4/3 of the work. rows: the measurements to go by (`rows_of`); None: those of all files in `folder`.
    """
    slower = 3 / 4 if checkpointing else 1.0
    peak = GPUS[gpu].peak_flops
    if mfu is not None:
        return Speed(slower * mfu * peak / flops_per_token, f"assumed: the given mfu={mfu:g}", False)
    rows = read_rows(folder) if rows is None else rows
    rows = [row for row in rows if (row["model"], row["size"]) == (model, size) and row["impl"] in OURS]
    for here in (True, False):
        near = [row for row in rows if same_gpu(row["gpu"], gpu) == here and (here or row.get("mfu"))]
        if not near:
            continue
        row = min(
            near,
            key=lambda r: (r["gpus"] > 1, abs(r["batch"] * r["tokens"] - micro_tokens), abs(r["tokens"] - context)),
        )
        shape = f"{row['file']}: {row['batch']} x {row['tokens']} on {row['gpus']} x {row['gpu']}"
        if here:
            rate = row["tokens_per_second"] / row["gpus"]
            if row["tokens"] != context and row.get("mfu_with_mixing"):  # attention works more for a token of more
                rate = row["mfu_with_mixing"] * peak / flops_per_token
            return Speed(slower * rate, f"measured, {shape}", not checkpointing)
        source = f"assumed: the MFU {row['mfu']:.2f} measured in {shape}"
        return Speed(slower * row["mfu"] * peak / flops_per_token, source, False)
    return Speed(
        slower * ASSUMED_MFU * peak / flops_per_token,
        f"assumed: MFU {ASSUMED_MFU:g} (no measurement of {model} {size}); mfu=VALUE sets another",
        False,
    )


def read_rows(folder: Path) -> list[Row]:
    """The rows of all throughput files in `folder`: `rows_of` each."""
    return [row for path in sorted(folder.glob("throughput_*.json")) for row in rows_of(path)]


def rows_of(path: Path) -> list[Row]:
    """The rows of a throughput file that a forecast goes by, each with its `file` and `gpu`.

    Raises:
        UserError: the file is not what the module says.
    """
    found: list[Row] = []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows, about = (content, {}) if isinstance(content, list) else (content["rows"], content)
        for row in rows:
            gpu = row.get("gpu") or about.get("gpu") or path.stem.removeprefix("throughput_")
            fields = ("model", "size", "impl", "batch", "tokens", "gpus", "tokens_per_second")
            if row.get("options"):  # not the recipe's defaults
                continue
            if all(row.get(name) is not None for name in fields):  # a model that did not run has a row too
                mfu = row.get("mfu_with_mixing") or row.get("mfu")
                found.append({**row, "mfu": mfu, "gpu": str(gpu), "file": path.name})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a table of throughput ({type(error).__name__}: {error})") from error
    return found


def same_gpu(measured: str, gpu: str) -> bool:
    """`NVIDIA H200`, `h200` and `h200-141gb` are the same; memory sizes are compared where both name one."""
    kind, _, memory = gpu.partition("-")
    text = measured.lower().replace(" ", "")
    return kind in text and ("gb" not in text or memory in text)
