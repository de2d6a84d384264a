"""Checks of settings that the studies share. Each raises a UserError that names the key, its value and what fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from efla_kernels.backends import lacks_gpu

from efla_lm.errors import UserError
from efla_lm.settings.compose import get


def expect_from(settings: Any, **allowed: Sequence[str]) -> None:
    """Each key holds a list of allowed values, not empty."""
    for name, values in allowed.items():
        given = getattr(settings, name)
        if not given or any(x not in values for x in given):
            raise UserError(f"{name}={given}: expected a list from {', '.join(values)}")


def expect_at_least(settings: Any, least: float, *names: str) -> None:
    """Each key holds null, a number from `least` up, or a list of such numbers, not empty."""
    for name in names:
        given = get(settings, name)
        numbers = given if isinstance(given, list) else [given]
        if not numbers or any(x is not None and x < least for x in numbers):
            kind = "expected a list of numbers, each at least" if isinstance(given, list) else "expected at least"
            raise UserError(f"{name}={given}: {kind} {least:g}")


def expect_above_zero(settings: Any, *names: str) -> None:
    """Each key holds a number above 0, or a list of such numbers, not empty."""
    for name in names:
        given = get(settings, name)
        numbers = given if isinstance(given, list) else [given]
        if not numbers or min(numbers) <= 0:
            kind = "a list of numbers above 0" if isinstance(given, list) else "more than 0"
            raise UserError(f"{name}={given}: expected {kind}")


def expect_backend(name: str, device: torch.device) -> None:
    """The backend runs on the device."""
    if lacks_gpu(name, device):
        raise UserError(f"backend={name} needs a GPU, the device is {device}: set auto or torch")


def parse_shapes(shapes: Sequence[str]) -> list[tuple[int, int]]:
    """Shapes such as `8x2048` as (batch, tokens)."""
    if not shapes:
        raise UserError("shapes: expected at least one BATCHxTOKENS such as 8x2048, got []")
    found = []
    for shape in shapes:
        parts = shape.split("x")
        if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
            raise UserError(f"shapes: expected BATCHxTOKENS such as 8x2048, got {shape!r}")
        found.append((int(parts[0]), int(parts[1])))
    return found
