"""The checks that several sections share. Each raises UserError: key, what was expected, what came, what to do."""

from typing import Any

from efla_lm.errors import UserError


def exactly_one(section: str, settings: Any, first: str, second: str) -> None:
    """One of two keys that say the same in different units has a value, the other is null."""
    a, b = getattr(settings, first), getattr(settings, second)
    if a is not None and b is not None:
        raise UserError(
            f"{section}.{first}={a} and {section}.{second}={b} say the same thing twice; set one of them to null"
        )
    if a is None and b is None:
        raise UserError(
            f"{section}.{first} and {section}.{second}: expected exactly one, got neither; give one of them a value"
        )


def positive(section: str, settings: Any, *names: str) -> None:
    """Each of the keys is null or at least 1."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise UserError(f"{section}{name}: got {value}, expected 1 or more")
