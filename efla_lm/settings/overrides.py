"""The command line, checked before anything is composed, so that a slip costs one line and no stack of causes.

An override is `key=value` for a key of the settings class, or `group=option` for a folder of `conf/` that the main
config's defaults list names.
"""

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

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


def check_overrides(
    overrides: Sequence[str], settings_class: type, groups: dict[str, list[str]], program: str
) -> list[str]:
    """Return the overrides as they are to be composed; raise UsageError at the first that cannot be meant.

    Two things are written out: a whole number given as a float for an integer key (`train.tokens=1e9`), and `null` for
    the sibling of a key that says the same in another unit (`train.steps=10` sets `train.tokens=null`).
    """
    keys = list_keys(settings_class)
    sections = list_sections(settings_class)
    given: dict[str, str] = {}
    for text in overrides:
        override = _parse(text)
        name = override.key_or_group
        if name in groups and not isinstance(override.value(), dict):
            if override.is_delete():
                raise UsageError(f"{text}: a group cannot be removed; choose one of {', '.join(groups[name])}")
            _check_option(name, override, groups[name])
            given[name] = f"{name}={_option(override)}"
        elif name in keys:
            given[name] = _check_value(text, override, keys[name], program)
        elif name in sections or any(_is_mapping(keys[k].type) and name.startswith(k + ".") for k in keys):
            given[name] = text
        else:
            raise UsageError(unknown_key(name, [*keys, *groups], program))
    extra: list[str] = []
    for name in given:
        sibling = _sibling(keys.get(name), given[name])
        if sibling and sibling not in given:
            extra.append(f"{sibling}=null")
    return [*given.values(), *extra]


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
    except OverrideParseException as error:
        reason = str(error).splitlines()[0] if str(error) else "not understood"
        raise UsageError(f"{text!r} cannot be read: {reason} (quote values with special characters: 'key=\"...\"')") from None
    if override.is_delete() or override.is_add():
        name = override.key_or_group
        raise UsageError(f"{text!r}: keys are neither added (+) nor removed (~); write {name}=VALUE")
    if override.package is not None:
        raise UsageError(f"{text!r}: a group goes where it belongs; write {override.key_or_group}=VALUE without @")
    if override.is_sweep_override():
        raise UsageError(f"{text!r}: one value per run; start one command for each value")
    return override


def _option(override: Override) -> str:
    value = override.value()
    return "null" if value is None else str(value)


def _check_option(group: str, override: Override, options: list[str]) -> None:
    value = override.value()
    chosen = [str(v) for v in value] if isinstance(value, list) else [_option(override)]
    for option in chosen:
        if option not in options and not (option == "null" and group == "experiment"):
            near = difflib.get_close_matches(option, options, n=1, cutoff=0.4)
            hint = f"did you mean {group}={near[0]}?" if near else "no option is named like it;"
            raise UsageError(f"{group}={option}: {hint} ({group}: {', '.join(options)})")


def _check_value(text: str, override: Override, info: KeyInfo, program: str) -> str:
    value = override.value()
    if isinstance(value, float) and value.is_integer() and int in _members(info.type) and float not in _members(info.type):
        return f"{info.name}={int(value)}"
    if isinstance(value, str) and "${" in value:
        return text  # a reference: checked when it is resolved
    if not _fits(value, info.type):
        got = "null" if value is None else repr(value) if not isinstance(value, str | bool) else str(value)
        raise UsageError(f"{info.name}: expected {info.type_name}, got {got} ({program} --help lists every key)")
    return text


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


def _sibling(info: KeyInfo | None, assignment: str) -> str | None:
    if info is None or info.instead_of is None or assignment.partition("=")[2].strip() == "null":
        return None
    head, _, _ = info.name.rpartition(".")
    return f"{head}.{info.instead_of}" if head else info.instead_of
