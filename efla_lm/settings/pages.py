"""The pages under `conf/`: the groups of a command, and mistakes in a page named with the file that has them."""

from pathlib import Path
from typing import Any

import yaml

from efla_lm.settings.command_line import UsageError
from efla_lm.settings.fields import KeyInfo
from efla_lm.settings.hints import near_option, unknown_key


def read_page(path: Path) -> dict[str, Any]:
    """A YAML file as a mapping; empty if there is no such file. UsageError names a file that cannot be read."""
    try:
        page = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: expected YAML in UTF-8: {' '.join(str(error).split())}") from error
    if page is not None and not isinstance(page, dict):
        raise UsageError(f"{path}: expected keys and values, got {type(page).__name__}")
    return page or {}


def list_groups(config_dir: Path, config_name: str) -> dict[str, list[str]]:
    """The groups of a command and their options: `{"model": ["deltanet", "efla", ...], ...}`; none without a page."""
    return {
        group: sorted(path.stem for path in (config_dir / group).glob("*.yaml"))
        for group in defaults_of(read_page(config_dir / f"{config_name}.yaml"))
    }


def defaults_of(page: dict[str, Any]) -> dict[str, str | None]:
    """The defaults list of a page: group -> option."""
    entries = [entry for entry in page.get("defaults", []) if isinstance(entry, dict)]
    return {
        str(group).removeprefix("optional ").removeprefix("override ").lstrip("/"): option
        for entry in entries
        for group, option in entry.items()
    }


def check_page(path: Path, group: str, keys: dict[str, KeyInfo], groups: dict[str, list[str]]) -> None:
    """Check the groups, options and keys that the page of a group's option names. UsageError names the file."""
    page = read_page(path)
    for other, option in defaults_of(page).items():
        if other not in groups:
            near = near_option(other, groups)
            hint = f", did you mean {near!r}?" if near else ""
            raise UsageError(f"{path}: no group {other!r}{hint} (groups: {', '.join(groups)})")
        if option is not None and option not in groups[other]:
            near = near_option(str(option), groups[other])
            hint = f", did you mean {near}?" if near else ""
            raise UsageError(f"{path}: no {other}={option}{hint} ({other}: {', '.join(groups[other])})")
    is_global = path.read_text(encoding="utf-8").lstrip().startswith("# @package _global_")
    for name in _leaves({key: value for key, value in page.items() if key != "defaults"}, "" if is_global else group):
        if name not in keys and not any(name.startswith(f"{key}.") for key in keys):
            raise UsageError(f"{path}: {unknown_key(name, keys, (), 'the command with')}")


def _leaves(values: dict[str, Any], prefix: str) -> list[str]:
    names = []
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        names += _leaves(value, name) if isinstance(value, dict) and value else [name]
    return names
