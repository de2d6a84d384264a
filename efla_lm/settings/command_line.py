"""The command line, checked before anything is composed, so that a mistake costs one line.

An override is `key=value` for a key of the settings class, or `group=option` for a group of the command: a folder of
`conf/` that the command's page names in its defaults list.
"""

import re
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from efla_lm.settings.fields import KeyInfo, list_keys, list_sections
from efla_lm.settings.hints import near_option, unknown_key

LIST_GROUPS = ("logger",)  # groups whose options do not exclude each other: logger=[wandb,tensorboard]


class UsageError(ValueError):
    """The command line itself is wrong: entry points print one line and exit with code 2."""


@dataclass(frozen=True)
class CommandLine:
    """Checked overrides: group choices for the composition, and values to set on the composed config."""

    groups: dict[str, str]
    values: dict[str, Any]


def check_overrides(
    overrides: Sequence[str], settings_class: type, groups: dict[str, list[str]], program: str
) -> CommandLine:
    """Sort and check the command line. UsageError at the first override that is wrong.

    Text for a string key, and the items of a list of strings, are taken as typed: `prompt=Once, there`, `name=007`,
    `data.sources=[a (1).txt,b#2.txt]`. A whole number may be written as a float for an integer key
    (`train.tokens=1e9`). A key that says the same as a sibling in another unit sets the sibling to null
    (`train.steps=10` sets `train.tokens=null`) unless both are given.
    """
    keys, sections = list_keys(settings_class), list_sections(settings_class)
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    for text in overrides:
        name, equals, raw = text.partition("=")
        if name in keys and equals and _takes(str, keys[name].type):
            values[name] = _read_string(raw, keys[name])
        elif name in keys and equals and _takes(list[str], keys[name].type) and _LIST.fullmatch(raw):
            values[name] = _read_strings(raw)
        elif name in groups:
            option = _choose(name, _parse(text), groups[name])
            chosen.pop(name, None)  # null for an optional group: as its page says
            chosen |= {} if option == "null" else {name: option}
        elif name in keys:
            values[name] = _read_value(_parse(text), raw, keys[name], program)
        elif any(_takes(dict, info.type) and name.startswith(key + ".") for key, info in keys.items()):
            values[name] = _parse(text).value()
        elif name in sections:
            example = next(key for key in keys if key.startswith(name + "."))
            raise UsageError(f"{text!r}: {name} is a section; give its keys one by one, e.g. {example}=VALUE")
        else:
            _parse(text)
            raise UsageError(unknown_key(name, keys, groups, program))
    for name in list(values):
        sibling = _sibling(keys[name]) if name in keys and values[name] is not None else None
        if sibling and sibling not in values:
            values[sibling] = None
    return CommandLine(chosen, values)


def _parse(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise UsageError(f"{text!r}: expected key=value, e.g. train.steps=300")
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = (str(error).splitlines() or ["not understood"])[0]
        raise UsageError(f"{text!r} cannot be read: {reason}") from None
    name = override.key_or_group
    if override.is_delete() or override.is_add():
        raise UsageError(f"{text!r}: keys are neither added (+) nor removed (~); write {name}=VALUE")
    if override.package is not None:
        raise UsageError(f"{text!r}: a group has its own place in the config; write {name}=VALUE without @")
    if override.is_sweep_override():
        raise UsageError(f"{text!r}: one value per run; start one command for each of them")
    return override


def _choose(group: str, override: Override, options: list[str]) -> str:
    value = override.value()
    if isinstance(value, list) and group not in LIST_GROUPS:
        example = value[0] if value else options[0]
        raise UsageError(
            f"{group}={_listed(value)}: a group takes one option, e.g. {group}={example}; start one command for each"
        )
    for option in value if isinstance(value, list) else [value]:
        name = "null" if option is None else str(option)
        if name not in options and not (name == "null" and group == "experiment"):
            near = near_option(name, options)
            hint = f"did you mean {group}={near}?" if near else "no option has a similar name;"
            raise UsageError(f"{group}={name}: {hint} ({group}: {', '.join(options)})")
    return "null" if value is None else _listed(value) if isinstance(value, list) else str(value)


def _listed(values: Sequence[object]) -> str:
    return f"[{','.join(map(str, values))}]"


def _read_string(raw: str, info: KeyInfo) -> str | None:
    if raw == "null" and type(None) in _members(info.type):
        return None
    return _unquoted(raw)


def _unquoted(text: str) -> str:
    """The text without the quotes around it; a quote that also occurs inside belongs to the text."""
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]
    return text[1:-1] if quoted else text


_LIST = re.compile(r"\[(.*)\]", re.DOTALL)
_ITEM = re.compile(r"""\s*("[^"]*"|'[^']*'|(?:\$\{[^}]*\}|[^,])*)\s*(?:,|$)""")


def _read_strings(raw: str) -> list[str]:
    """`[a, 'b,c']`: items between commas, without the spaces and quotes around them; quotes protect commas."""
    inside = raw[1:-1].strip()
    if not inside:
        return []
    items, place = [], 0
    while place < len(inside):
        match = _ITEM.match(inside, place)
        if match is None or not match[1].strip():
            raise UsageError(f"{raw!r} cannot be read: expected items between commas, e.g. [a,'b, c']")
        items.append(_unquoted(match[1].strip()))
        place = match.end()
    return items


def _read_value(override: Override, raw: str, info: KeyInfo, program: str) -> Any:
    value, members = override.value(), _members(info.type)
    if isinstance(value, str) and "${" in value:
        return value  # a reference: checked when it is resolved
    if isinstance(value, float) and value.is_integer() and int in members and float not in members:
        return int(value)
    if not _fits(value, info.type):
        as_list = f"{info.name}=[{raw}]"
        hint = f"write {as_list}" if _fits([value], info.type) else f"{program} --help lists every key"
        raise UsageError(f"{info.name}: expected {info.type_name}, got {raw or 'nothing'} ({hint})")
    return value


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _takes(wanted: Any, kind: Any) -> bool:
    """Whether a declared type admits `wanted` (`dict` stands for every dict)."""
    return any(member == wanted or (wanted is dict and typing.get_origin(member) is dict) for member in _members(kind))


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value read from the command line is of a declared type, as OmegaConf will convert it."""
    for member in _members(kind):
        if member is Any or (member is type(None) and value is None):
            return True
        if typing.get_origin(member) is list or member is list:
            (inner,) = typing.get_args(member) or (Any,)
            if isinstance(value, list) and all(_fits(item, inner) for item in value):
                return True
        elif typing.get_origin(member) is dict or member is dict:
            if isinstance(value, dict):
                return True
        elif member is bool:
            if isinstance(value, bool) or value in (0, 1):
                return True
        elif member in (int, float):
            numbers = int if member is int else (int, float)
            if isinstance(value, numbers) and not isinstance(value, bool):
                return True
        elif member is str and not isinstance(value, list | dict) and value is not None:
            return True
    return False


def _sibling(info: KeyInfo) -> str | None:
    head, _, _ = info.name.rpartition(".")
    return None if info.instead_of is None else f"{head}.{info.instead_of}" if head else info.instead_of
