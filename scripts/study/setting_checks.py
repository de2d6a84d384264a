"""Checks that the benchmarks' settings share."""

from collections.abc import Sequence
from typing import Any

from efla_lm.errors import UserError


def expect_from(settings: Any, **allowed: Sequence[str]) -> None:
    """Raise UserError unless each key named holds a list, not empty, of values from those allowed."""
    for name, values in allowed.items():
        given = getattr(settings, name)
        if not given or any(x not in values for x in given):
            raise UserError(f"{name}={given}: expected a list from {', '.join(values)}")


def expect_positive(settings: Any, *names: str) -> None:
    """Raise UserError unless each key named is at least 1, or null."""
    for name in names:
        given = getattr(settings, name)
        if given is not None and given < 1:
            raise UserError(f"{name}={given}: expected at least 1")


def expect_counts(settings: Any, *names: str) -> None:
    """Raise UserError unless each key named holds a list, not empty, of numbers from 1 up."""
    for name in names:
        given = getattr(settings, name)
        if not given or any(x < 1 for x in given):
            raise UserError(f"{name}={given}: expected a list of numbers from 1 up")


def pairs(shapes: Sequence[str]) -> list[tuple[int, int]]:
    """Shapes such as `8x2048` as (batch, tokens). Raises UserError for anything else, and for none."""
    if not shapes:
        raise UserError("shapes: expected at least one BATCHxTOKENS such as 8x2048, got []")
    found = []
    for shape in shapes:
        parts = shape.split("x")
        if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
            raise UserError(f"shapes: expected BATCHxTOKENS such as 8x2048, got {shape!r}")
        found.append((int(parts[0]), int(parts[1])))
    return found
