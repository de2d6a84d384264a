"""How a settings key is declared, and how all keys of a settings class are listed.

A key is a dataclass field with a default and one line of help; both live here and nowhere else, so that `--help`, the
check of the command line, the check of values and the conversion of paths read the same table.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

MISSING = "???"  # OmegaConf's mark for a value that must be given


@dataclass(frozen=True)
class PathRule:
    """Which values of a key are file paths, to be made absolute against the folder the command was started in.

    words: values that are not paths (`auto`, `never`); prefixes: values that begin so are not paths (`hub:NAME`).
    existing: only what exists on disk, or plainly looks like a path, counts (a tokenizer may also be a hub name).
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
) -> Any:
    """Declare one settings key.

    default: a value, a `"${other.key}"` reference, or MISSING (the user must give it); lists are copied per instance.
    choices: the only values allowed. path: the value is a path (see `PathRule`).
    instead_of: the sibling key that says the same thing in another unit; giving one of the two on the command line
    sets the other to null (unless that one is on the command line too).
    """
    metadata = {"help": help, "choices": choices, "path": path, "instead_of": instead_of}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


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
