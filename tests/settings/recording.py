"""Settings that remember which of their keys were read."""

import dataclasses
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def recording(settings: Settings, read: set[str], prefix: str = "") -> Settings:
    """A copy of a settings object that adds the dotted name of every key to `read` when code takes its value.

    The copy is an instance of the same class. Dumping (`to_dict`, `to_yaml`) reads past it and does not count.
    """
    names = {field.name for field in dataclasses.fields(settings)}  # type: ignore[arg-type]

    def __getattribute__(self: Any, name: str) -> Any:
        if name in names:
            read.add(prefix + name)
        return object.__getattribute__(self, name)

    kind = type(settings)
    recorder = type(kind.__name__, (kind,), {"__getattribute__": __getattribute__})
    copy = object.__new__(recorder)
    for name, value in vars(settings).items():
        nested = dataclasses.is_dataclass(value)
        copy.__dict__[name] = recording(value, read, f"{prefix}{name}.") if nested else value
    return copy
