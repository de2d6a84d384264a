"""From the files under `conf/` and the command line to one typed settings object with absolute paths."""

import dataclasses
import difflib
import math
import os.path
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efla_lm.settings.command_line import UsageError, check_overrides, list_groups
from efla_lm.settings.fields import MISSING, KeyInfo, PathRule, list_keys

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
    """Compose `conf/CONFIG_NAME.yaml` with command line overrides into a `settings_class` instance.

    Paths in it are absolute (against the current folder), references are resolved, nothing mandatory is missing and
    every value is one of its key's choices; UsageError with one line otherwise. Then the class's own `validate()` runs,
    which raises UserError.
    """
    program = program or f"{config_name}.py"
    config = compose_config(config_name, overrides, settings_class, config_dir=config_dir, program=program)
    settings = to_settings(config, settings_class, program=program)
    make_paths_absolute(settings, Path.cwd())
    validate(settings)
    return settings


def validate(settings: Any) -> None:
    """Call the settings' own `validate()`, where its class has one. Raises UserError."""
    check = getattr(settings, "validate", None)
    if check is not None:
        check()


def compose_config(
    config_name: str,
    overrides: Sequence[str],
    settings_class: type,
    *,
    config_dir: Path = CONFIG_DIR,
    program: str = "",
) -> DictConfig:
    """The composed config before references are resolved, typed by the class. Raises UsageError with one line."""
    if not (config_dir / f"{config_name}.yaml").is_file():
        raise FileNotFoundError(f"{config_dir / config_name}.yaml: the main config of this command is missing")
    command = check_overrides(overrides, settings_class, list_groups(config_dir, config_name), program)
    ConfigStore.instance().store(name=f"{config_name}_schema", node=settings_class)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir), version_base="1.3"):
            config = hydra_compose(config_name, overrides=command.groups)
        # Merged onto the class once more, so that a main config without the schema in its defaults is typed as well.
        typed = OmegaConf.merge(OmegaConf.structured(settings_class), config)
        for name, value in command.values.items():  # names are checked; force_add serves free keys of mappings
            OmegaConf.update(typed, name, value, merge=False, force_add=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_one_line(error, list_keys(settings_class))) from error
    assert isinstance(typed, DictConfig)
    return typed


def to_settings(config: DictConfig, settings_class: type[Settings], *, program: str = "") -> Settings:
    """Resolve references and check what can be checked key by key. Raises UsageError with one line."""
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
            near = difflib.get_close_matches(str(value), info.choices, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{name}: got {value!r}, {hint}expected one of {', '.join(info.choices)}")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, float) and not math.isfinite(number):  # NaN passes every comparison of ranges
                raise UsageError(f"{name}: got {number}, expected a finite number")
    return settings


def get(settings: Any, name: str) -> Any:
    """The value of a dotted key, read without `__getattribute__` so that a recording object does not count it."""
    for part in name.split("."):
        settings = object.__getattribute__(settings, "__dict__")[part]
    return settings


def make_paths_absolute(settings: Any, base: Path) -> None:
    """Replace every path in a settings object by an absolute one, in place. Runs once, while the object is made."""
    for name, info in list_keys(type(settings)).items():
        if info.path is None:
            continue
        head, _, leaf = name.rpartition(".")
        section = get(settings, head) if head else settings
        value = getattr(section, leaf)
        if isinstance(value, list):
            setattr(section, leaf, [_absolute(item, info.path, base) for item in value])
        elif isinstance(value, str):
            setattr(section, leaf, _absolute(value, info.path, base))


def _absolute(value: str, rule: PathRule, base: Path) -> str:
    if value in rule.words or value.startswith(rule.prefixes) or value == MISSING:
        return value
    path = Path(value).expanduser()
    if rule.existing and not (base / path).exists() and not value.startswith(("/", "~", ".")):
        return value
    # normpath of a join, not resolve(): links stay as the user named them, and globs are left alone.
    return os.path.normpath(base / path)


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
    """The resolved settings as YAML, in the order of declaration: what `runs/NAME/config.yaml` holds."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(settings)))


def load_settings(path: str | Path, settings_class: type[Settings]) -> Settings:
    """Read back a dumped config. Raises UsageError when it does not fit the class (another version wrote it)."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such config")
    try:
        config = OmegaConf.merge(OmegaConf.structured(settings_class), OmegaConf.load(path))
    except OmegaConfBaseException as error:
        raise UsageError(f"{path}: {_one_line(error, list_keys(settings_class))}") from error
    assert isinstance(config, DictConfig)
    return to_settings(config, settings_class)


def _one_line(error: BaseException, keys: dict[str, KeyInfo]) -> str:
    """The innermost reason of a composition error, with its key, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    name = getattr(error, "full_key", None) or ""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if name in keys and "could not be converted" in reason:
        value = reason.split(" of type")[0].removeprefix("Value ")
        return f"{name}: expected {keys[name].type_name}, got {value}"
    return f"{name}: {reason}" if name and name not in reason else reason
