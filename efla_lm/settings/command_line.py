"""The command line, checked before anything is composed, so that a slip costs one line and no stack of causes.

An override is `key=value` for a key of the settings class, or `group=option` for a folder of `conf/` that the main
config's defaults list names.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from efla_lm.settings.fields import KeyInfo, list_keys, list_sections


class UsageError(ValueError):
    """The command line itself is wrong: entry points print one line and exit with code 2."""


def list_groups(config_dir: Path, config_name: str) -> dict[str, list[str]]:
    """The groups of a main config and their options: `{"model": ["deltanet", "efla", ...], ...}`."""
    page = yaml.safe_load((config_dir / f"{config_name}.yaml").read_text()) or {}
    groups: dict[str, list[str]] = {}
    for entry in page.get("defaults", []):
        if isinstance(entry, dict):
            name = next(iter(entry)).removeprefix("optional ").removeprefix("override ").lstrip("/")
            groups[name] = sorted(path.stem for path in (config_dir / name).glob("*.yaml"))
    return groups


@dataclass(frozen=True)
class CommandLine:
    """Checked overrides: group choices for the composition, and values that are set on what it gives."""

    groups: list[str]
    values: dict[str, Any]


def check_overrides(
    overrides: Sequence[str], settings_class: type, groups: dict[str, list[str]], program: str
) -> CommandLine:
    """Sort and check the command line; raise UsageError at the first override that cannot be meant.

    Three liberties are taken, so that what people type is what they get: the text for a string key is taken as it
    stands (`prompt=Once, there`, `name=007`), a whole number may be a float for an integer key (`train.tokens=1e9`),
    and a key that says the same as a sibling in another unit sets that one to null (`train.steps=10` sets
    `train.tokens=null`) unless the sibling is given too.
    """
    keys, sections = list_keys(settings_class), list_sections(settings_class)
    chosen: dict[str, str] = {}
    values: dict[str, Any] = {}
    for text in overrides:
        name, equals, raw = text.partition("=")
        if name in keys and equals and _is_string(keys[name].type):
            values[name] = _read_string(raw, keys[name])
            continue
        override = _parse(text)
        if name in groups:
            choice = _choose(name, override, groups[name])
            chosen.pop(name, None)  # an optional group's null is what its page says
            chosen |= {} if choice == "null" else {name: f"{name}={choice}"}
        elif name in keys:
            values[name] = _read_value(override, raw, keys[name], program)
        elif any(_is_mapping(info.type) and name.startswith(key + ".") for key, info in keys.items()):
            values[name] = override.value()
        elif name in sections:
            example = next(key for key in keys if key.startswith(name + "."))
            raise UsageError(f"{text!r}: {name} is a section; give its keys one by one, e.g. {example}=VALUE")
        else:
            raise UsageError(unknown_key(name, [*keys, *groups], program))
    for name in list(values):
        sibling = _sibling(keys[name]) if name in keys and values[name] is not None else None
        if sibling and sibling not in values:
            values[sibling] = None
    return CommandLine(list(chosen.values()), values)


def unknown_key(name: str, known: Iterable[str], program: str) -> str:
    """One line for a key that does not exist, naming the nearest that does."""
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else "nothing is named like it;"
    return f"unknown key {name!r}: {hint} ({program} --help lists every key)"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like `name`, by its whole spelling or by its last part alone."""
    known = list(known)
    exact = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    close = difflib.get_close_matches(name, exact or known, n=1, cutoff=0.0 if exact else 0.6)
    if close:
        return close[0]
    tails = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    tail = difflib.get_close_matches(name.rsplit(".", 1)[-1], tails, n=1, cutoff=0.7)
    return tails[tail[0]] if tail else None


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
        raise UsageError(f"{text!r}: one value per run; start one command for each, or write a list as {name}=[a,b]")
    return override


def _choose(group: str, override: Override, options: list[str]) -> str:
    value = override.value()
    for option in value if isinstance(value, list) else [value]:
        name = "null" if option is None else str(option)
        if name not in options and not (name == "null" and group == "experiment"):
            near = difflib.get_close_matches(name, options, n=1, cutoff=0.4)
            hint = f"did you mean {group}={near[0]}?" if near else "no option is named like it;"
            raise UsageError(f"{group}={name}: {hint} ({group}: {', '.join(options)})")
    return "null" if value is None else f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _read_string(raw: str, info: KeyInfo) -> str | None:
    if raw == "null" and type(None) in _members(info.type):
        return None
    if len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"":
        return raw[1:-1]
    return raw


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


def _is_string(kind: Any) -> bool:
    return str in _members(kind)


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_mapping(kind: Any) -> bool:
    return any(typing.get_origin(k) is dict or k is dict for k in _members(kind))


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value read from the command line is of a declared type, as the config library will convert it."""
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
        elif member is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif member is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif member is str and not isinstance(value, list | dict) and value is not None:
            return True
    return False


def _sibling(info: KeyInfo) -> str | None:
    head, _, _ = info.name.rpartition(".")
    return None if info.instead_of is None else f"{head}.{info.instead_of}" if head else info.instead_of
