"""Write docs/configuration.md, the reference of all configuration keys: `python -m scripts.reference`.

The page is made from the settings classes alone; a test fails when it is not current.
"""

import dataclasses
import importlib
import inspect
import typing
from pathlib import Path
from typing import Any

from efla_data.fields import MISSING

from efla_lm.settings import EntryPoint, list_keys
from efla_lm.settings.compose import CONFIG_DIR
from efla_lm.settings.pages import defaults_of, list_groups, read_page

ROOT = CONFIG_DIR.parent
PAGE = ROOT / "docs" / "configuration.md"
FIRST = ("train.py", "scripts/prepare.py", "eval.py", "scripts/generate.py", "scripts/export.py")
INTRODUCTION = """# Configuration keys

`python -m scripts.reference` writes this page from the settings classes. `COMMAND --help` prints the same keys with the
values under the groups given.

A command line is a list of `key=value` and `group=option`, e.g. `python train.py model=efla size=340m train.steps=100`.

- Values come from the class's default, then from the option of each group (`conf/GROUP/OPTION.yaml`), then from
  `experiment=NAME`, then from the command line.
- `${size.layers}` is the value of another key. `null` is no value.
- Paths are taken against the folder where the command starts. Lists are written `[a,b]`; quotes protect a comma.
- Of two keys that say the same in different units (`train.steps`, `train.tokens`), setting one sets the other to null.
"""


def commands() -> dict[str, EntryPoint[Any]]:
    """Every command of the repository, by the line that calls it."""
    paths = [*sorted(ROOT.glob("*.py")), *sorted(ROOT.glob("scripts/**/*.py"))]
    names = [str(path.relative_to(ROOT)) for path in paths if "\n@entry(" in path.read_text(encoding="utf-8")]
    found = {}
    for name in [*FIRST, *(name for name in names if name not in FIRST)]:
        module = name.removesuffix(".py").replace("/", ".")
        call = f"python -m {module.removesuffix('.__main__')}" if "." in module else f"python {name}"
        found[call] = importlib.import_module(module).main
    return found


def write() -> str:
    """The text of the page."""
    lines, seen = [INTRODUCTION], dict[type, str]()
    for call, entry in commands().items():
        help = " ".join((entry.work.__doc__ or "").split("\n\n")[0].split())
        lines += [f"## `{call}`", "", help, ""]
        groups = list_groups(entry.config_dir, entry.config_name)
        chosen = defaults_of(read_page(entry.config_dir / f"{entry.config_name}.yaml"))
        if groups:
            lines += ["| group | options (the default first) |", "| --- | --- |"]
            for group, options in groups.items():
                first = [chosen[group]] if chosen[group] in options else ["null"]
                lines.append(f"| `{group}` | {', '.join([*first, *(o for o in options if o not in first)])} |")
            lines.append("")
        lines += _section(entry.settings_class, "", seen, call)
    return "\n".join(lines).rstrip() + "\n"


def _section(settings_class: type, prefix: str, seen: dict[type, str], call: str) -> list[str]:
    """The keys of a class, then those of its sections; a section that an earlier command has is named."""
    hints = typing.get_type_hints(settings_class)
    sections = {field.name: hints[field.name] for field in dataclasses.fields(settings_class)}
    sections = {name: kind for name, kind in sections.items() if dataclasses.is_dataclass(kind)}
    keys = {name: info for name, info in list_keys(settings_class).items() if "." not in name}
    if base := next((kind for kind in settings_class.__mro__[1:] if kind in seen and not prefix), None):
        lines = [f"All keys of `{seen[base]}`, and:", ""]
        keys = {name: info for name, info in keys.items() if name not in list_keys(base)}
        sections = {}
    else:
        lines = [f"### `{prefix}`", "", inspect.cleandoc(settings_class.__doc__ or ""), ""] if prefix else []
    if keys:
        lines += ["| key | default | type | meaning |", "| --- | --- | --- | --- |"]
    for name, info in keys.items():
        kind = " or ".join(info.choices) or info.type_name
        meaning = info.help.replace("|", r"\|")
        lines.append(f"| `{prefix}{name}` | {_shown(info.default)} | {kind} | {meaning} |")
    lines += [""] if keys else []
    seen.setdefault(settings_class, call)
    for name, kind in sections.items():
        if kind in seen:
            lines += [f"`{prefix}{name}.*`: as in `{seen[kind]}`.", ""]
        else:
            lines += _section(kind, f"{prefix}{name}.", seen, call)
    return lines


def _shown(default: Any) -> str:
    if default == MISSING:
        return "required"
    if isinstance(default, list):
        return f"`[{','.join(map(str, default))}]`"
    return f"`{'null' if default is None else str(default).lower() if isinstance(default, bool) else default}`"


def main(page: Path = PAGE) -> None:
    """Write the page."""
    page.write_text(write(), encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
