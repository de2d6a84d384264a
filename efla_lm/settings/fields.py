"""All keys of a settings class: the table behind `--help`, the check of the command line, of values and of paths.

`efla_data.fields.key` declares a key beside its field; this module lists them.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from efla_data.fields import MISSING, PATH, PATH_OR_HUB, PathRule, key

__all__ = ["MISSING", "PATH", "PATH_OR_HUB", "KeyInfo", "PathRule", "key", "list_keys", "list_sections"]


@dataclass(frozen=True)
class KeyInfo:
    """One line of the table of keys."""

    name: str  # dotted, as on the command line
    type: Any
    default: Any
    help: str
    choices: tuple[str, ...]
    path: PathRule | None
    instead_of: str | None
    also_called: tuple[str, ...]

    @property
    def type_name(self) -> str:
        """The type in words for messages: `int`, `int or null`, `list of str`."""
        return _type_name(self.type)


def _type_name(kind: Any) -> str:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        inner = [_type_name(t) for t in typing.get_args(kind) if t is not type(None)]
        return " or ".join([*inner, "null"] if type(None) in typing.get_args(kind) else inner)
    if typing.get_origin(kind) is list:
        return f"list of {_type_name(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) is dict:
        return "mapping"
    return "true or false" if kind is bool else getattr(kind, "__name__", str(kind))


def list_keys(settings_class: type, prefix: str = "") -> dict[str, KeyInfo]:
    """All leaf keys of a settings class by dotted name, in the order of declaration."""
    table: dict[str, KeyInfo] = {}
    hints = typing.get_type_hints(settings_class)
    for field in dataclasses.fields(settings_class):
        name, kind = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            table |= list_keys(typing.cast(type, kind), name + ".")
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        meta = field.metadata
        table[name] = KeyInfo(
            name=name,
            type=kind,
            default=MISSING if default is dataclasses.MISSING else default,
            help=meta.get("help", ""),
            choices=meta.get("choices", ()),
            path=meta.get("path"),
            instead_of=meta.get("instead_of"),
            also_called=meta.get("also_called", ()),
        )
    return table


def list_sections(settings_class: type, prefix: str = "") -> dict[str, type]:
    """The nested settings classes by dotted name: `{"train": LoopSettings, ...}`."""
    sections: dict[str, type] = {}
    hints = typing.get_type_hints(settings_class)
    for field in dataclasses.fields(settings_class):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            sections[prefix + field.name] = typing.cast(type, kind)
            sections |= list_sections(typing.cast(type, kind), f"{prefix}{field.name}.")
    return sections
