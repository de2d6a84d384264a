"""From the pages under `conf/` and the command line to one typed settings object with absolute paths."""

import dataclasses
import math
import os.path
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efla_lm.settings.command_line import UsageError, check_overrides
from efla_lm.settings.fields import MISSING, KeyInfo, PathRule, list_keys, list_sections
from efla_lm.settings.hints import near_option
from efla_lm.settings.pages import check_page, defaults_of, list_groups, read_page

CONFIG_DIR = Path(__file__).resolve().parents[2] / "conf"
Settings = TypeVar("Settings")


def compose(
    config_name: str,
    overrides: Sequence[str],
    settings_class: type[Settings],
    *,
    config_dir: Path = CONFIG_DIR,
    program: str = "",
) -> Settings:
    """Settings of a command: the class's defaults, its page `conf/CONFIG_NAME.yaml` if it has one, the overrides.

    Paths are absolute (against the current folder), references are resolved, and every value is one of its key's
    choices. UsageError, in one line, for what is wrong with a page or an override; UserError from the checks of values.
    """
    program = program or f"{config_name}.py"
    config = compose_config(config_name, overrides, settings_class, config_dir=config_dir, program=program)
    settings = to_settings(config, settings_class, Path.cwd())
    validate(settings)
    return settings


def compose_config(
    config_name: str,
    overrides: Sequence[str],
    settings_class: type,
    *,
    config_dir: Path = CONFIG_DIR,
    program: str = "",
) -> DictConfig:
    """The composed config, typed by the class, before references are resolved. UsageError with one line."""
    keys, groups = list_keys(settings_class), list_groups(config_dir, config_name)
    command = check_overrides(overrides, settings_class, groups, program)
    page = config_dir / f"{config_name}.yaml"
    if page.is_file():
        check_page(page, "", keys, groups)
    for group, option in (defaults_of(read_page(page)) | command.groups).items():
        for name in (option or "").strip("[]").split(","):
            if (config_dir / group / f"{name}.yaml").is_file():
                check_page(config_dir / group / f"{name}.yaml", group, keys, groups)
    try:
        typed = OmegaConf.structured(settings_class)
        if page.is_file():
            GlobalHydra.instance().clear()
            with initialize_config_dir(str(config_dir), version_base="1.3"):
                choices = [f"{group}={option}" for group, option in command.groups.items()]
                typed = OmegaConf.merge(typed, hydra_compose(config_name, overrides=choices))
        for name, value in command.values.items():  # names are checked; force_add serves free keys of mappings
            OmegaConf.update(typed, name, value, merge=False, force_add=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UsageError(_one_line(error, keys)) from error
    assert isinstance(typed, DictConfig)
    return typed


def to_settings(config: DictConfig, settings_class: type[Settings], folder: Path | None = None) -> Settings:
    """Resolve references, check values key by key, make paths absolute against `folder`. UsageError with one line."""
    keys = list_keys(settings_class)
    try:
        missing = OmegaConf.missing_keys(config)
        if missing:
            name = next((k for k in keys if k in missing), min(missing))
            what = keys[name].help if name in keys else "mandatory"
            raise UsageError(f"{name}: no value given ({what}); add {name}=VALUE to the command")
        settings = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise UsageError(_one_line(error, keys)) from error
    assert isinstance(settings, settings_class)
    for name, info in keys.items():
        value = get(settings, name)
        if info.choices and value is not None and value not in info.choices:
            near = near_option(str(value), info.choices)
            hint = f"did you mean {near}? " if near else ""
            raise UsageError(f"{name}: got {value!r}, {hint}expected one of {', '.join(info.choices)}")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):  # NaN passes every comparison of ranges
                raise UsageError(f"{name}: got {number}, expected a finite number")
        if info.path is not None and value is not None and folder is not None:
            head, _, leaf = name.rpartition(".")
            setattr(get(settings, head) if head else settings, leaf, _absolute(name, value, info.path, folder))
    return settings


def validate(settings: Any) -> None:
    """Call `validate()` of every section that has one, then of the whole. Raises UserError."""
    for part in [*(get(settings, name) for name in list_sections(type(settings))), settings]:
        if hasattr(part, "validate"):
            part.validate()


def get(settings: Any, name: str) -> Any:
    """The value of a dotted key, read without `__getattribute__` so that a recording object does not count it."""
    for part in name.split("."):
        settings = object.__getattribute__(settings, "__dict__")[part]
    return settings


def _absolute(name: str, value: Any, rule: PathRule, folder: Path) -> Any:
    """A path, or each of a list, against `folder`. Links stay as the user named them; globs stay globs."""
    if isinstance(value, list):
        return [_absolute(name, item, rule, folder) for item in value]
    if value in rule.words or value.startswith(rule.prefixes) or value == MISSING:
        return value
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        raise UsageError(f"{name}: got {value!r}, expected a local path; copy or mount it")
    path = folder / Path(value).expanduser()
    if rule.existing and not path.exists() and not value.startswith(("/", "~", ".")):
        return value
    return os.path.normpath(path)


def to_dict(settings: Any) -> dict[str, Any]:
    """A settings object as plain nested dicts, read without `__getattribute__` (see `get`)."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = get(settings, field.name)
        if dataclasses.is_dataclass(value):
            plain[field.name] = to_dict(value)
        else:
            plain[field.name] = list(value) if isinstance(value, list) else value
    return plain


def to_yaml(settings: Any) -> str:
    """The resolved settings as YAML, in the order of declaration: the content of `runs/NAME/config.yaml`."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(settings)))


def load_settings(path: str | Path, settings_class: type[Settings]) -> Settings:
    """Read back a dumped config. UsageError when it does not fit the class (another version wrote it)."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such config")
    try:
        config = OmegaConf.merge(OmegaConf.structured(settings_class), OmegaConf.load(path))
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {_one_line(error, list_keys(settings_class))}") from error
    assert isinstance(config, DictConfig)
    return to_settings(config, settings_class)


def _one_line(error: BaseException, keys: dict[str, KeyInfo]) -> str:
    """The innermost reason of a composition error, with its key, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, yaml.YAMLError):
        return " ".join(str(error).split())
    name = getattr(error, "full_key", None) or ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if name in keys and "could not be converted" in reason:
        value = reason.split(" of type")[0].removeprefix("Value ")
        return f"{name}: expected {keys[name].type_name}, got {value}"
    return f"{name}: {reason}" if name and name not in reason else reason
