"""How one field of a settings class is declared: default, line of help, allowed values, path rule, other names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

MISSING = "???"  # OmegaConf's mark for a value that must be given


@dataclass(frozen=True)
class PathRule:
    """Which values of a key are file paths. Paths become absolute, against the folder where the command started.

    words: values that are not paths (`auto`, `never`). prefixes: values that start so are not paths (`hub:NAME`).
    existing: a value counts as a path only if it exists or plainly looks like one (a tokenizer may be a hub name).
    """

    words: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    existing: bool = False


PATH = PathRule()
PATH_OR_HUB = PathRule(existing=True)


def key(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: tuple[str, ...] = (),
    path: PathRule | None = None,
    instead_of: str | None = None,
    also_called: tuple[str, ...] = (),
) -> Any:
    """Declare one settings key.

    default: a value, a `"${other.key}"` reference, or MISSING (the user must give it). Lists are copied per instance.
    choices: the only allowed values. path: the value is a path (see `PathRule`).
    instead_of: the sibling key that says the same in another unit. Setting one of the two on the command line sets the
    other to null, unless both are given.
    also_called: names that other projects use for this key; an unknown key of such a name is answered with this key.
    """
    metadata = {
        "help": help, "choices": choices, "path": path, "instead_of": instead_of, "also_called": also_called
    }  # fmt: skip
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
