"""The frame of every command: read the settings, print help, report a user's error on one line, return an exit code.

    from efla_lm.settings import TrainSettings, entry

    @entry("train", TrainSettings)
    def main(settings: TrainSettings) -> int | None:
        \"\"\"Train a language model.\"\"\"
        ...

    if __name__ == "__main__":
        main()                      # reads sys.argv, ends the process with the exit code
        # in a test: main.run(["size=tiny", "train.steps=2"]) -> exit code

The frame neither changes the current folder nor makes one.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import efla_data.errors
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efla_lm.errors import UserError
from efla_lm.settings.command_line import UsageError
from efla_lm.settings.compose import CONFIG_DIR, compose_config, get, to_settings, to_yaml, validate
from efla_lm.settings.fields import list_keys
from efla_lm.settings.pages import list_groups

Settings = TypeVar("Settings")

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# How a user mends a place that cannot be read or written. Any other OSError is shown with its traceback.
BAD_PLACE = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "choose a place that you may use, or change its rights"),
    errno.EROFS: "choose a place that can be written",
    **dict.fromkeys((errno.EEXIST, errno.ENOTDIR), "a file is in the way: choose another place, or move it"),
    errno.EISDIR: "expected a file, a folder is there: choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "choose another place, or free it",
}


class EntryPoint(Generic[Settings]):
    """A command: `work(settings)` behind a hydra command line. Call it to run on `sys.argv` and exit."""

    def __init__(
        self, work: Callable[[Settings], int | None], config_name: str, settings_class: type[Settings], config_dir: Path
    ) -> None:
        self.work = work
        self.config_name = config_name
        self.settings_class = settings_class
        self.config_dir = config_dir
        self.__doc__ = work.__doc__

    def __call__(self) -> NoReturn:
        sys.exit(self.run(sys.argv[1:]))

    def run(self, arguments: Sequence[str], program: str | None = None) -> int:
        """Run on a list of arguments; return the exit code.

        0 done, 1 an error that the user can fix, 2 an invalid command line, 130 interrupted. Other exceptions pass.
        """
        program = program or program_name()
        if {"-m", "--multirun"} & {*arguments}:
            print(f"error: {program} takes one value per key and run; start one command for each", file=sys.stderr)
            return 2
        parser = argparse.ArgumentParser(prog=program, add_help=False, allow_abbrev=False)
        parser.add_argument("-h", "--help", action="store_true")
        parser.add_argument("-c", "--cfg", choices=("job",))
        parser.add_argument("--resolve", action="store_true")
        parser.add_argument("overrides", nargs="*")
        try:
            options = parser.parse_intermixed_args(list(arguments))
        except SystemExit as stop:
            return int(stop.code or 0)
        try:
            config = compose_config(
                self.config_name, options.overrides, self.settings_class, config_dir=self.config_dir, program=program
            )
            if options.help:
                print(self.help(program, config), flush=True)
                return 0
            if options.cfg and not options.resolve:
                print(OmegaConf.to_yaml(config), end="", flush=True)
                return 0
            settings = to_settings(config, self.settings_class, Path.cwd())
            if options.cfg:
                print(to_yaml(settings), end="", flush=True)
                return 0
        except UsageError as error:
            _report(error, every_rank=False)
            return 2
        except BrokenPipeError:  # `--help | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        try:
            validate(settings)
            return self.work(settings) or 0
        except (UserError, efla_data.errors.DataError, UsageError, FileNotFoundError) as error:
            _report(error, every_rank=True, settings=settings)
            return 1
        except OSError as error:
            if error.errno not in DISK_FULL and (error.errno not in BAD_PLACE or error.filename is None):
                raise
            _report(error, every_rank=True, settings=settings)
            return 1
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130

    def help(self, program: str, config: DictConfig) -> str:
        """What the command does, its groups, and every key with its value in `config`, its type and its help."""
        groups = list_groups(self.config_dir, self.config_name)
        lines = [f"usage: {program} [group=option ...] [key=value ...]", ""]
        lines += [" ".join((self.work.__doc__ or "").split("\n\n")[0].split()), ""]
        if groups:
            lines += ["groups:", *(f"  {group}={{{','.join(options)}}}" for group, options in groups.items()), ""]
        lines.append("keys, with their values under the groups given:")
        for name, info in list_keys(self.settings_class).items():
            lines.append(f"  {name}={_shown(config, name)}")
            kind = " | ".join(info.choices) or info.type_name
            lines.append(f"      {kind}: {info.help}" if info.help else f"      {kind}")
        lines += [
            "",
            "options:",
            "  -h, --help       this text; groups and keys given beside it show in the values",
            "  -c, --cfg job    print the composed config and stop; with --resolve, as the command would use it",
        ]
        return "\n".join(lines)


def entry(
    config_name: str, settings_class: type[Settings], *, config_dir: Path = CONFIG_DIR
) -> Callable[[Callable[[Settings], int | None]], EntryPoint[Settings]]:
    """Make a function of typed settings into a command; the module has an example.

    A page `conf/CONFIG_NAME.yaml` is needed only for groups, and for values that differ from the class's defaults.
    """

    def wrap(work: Callable[[Settings], int | None]) -> EntryPoint[Settings]:
        return EntryPoint(work, config_name, settings_class, config_dir)

    return wrap


def _shown(config: DictConfig, name: str) -> str:
    """A value as one would type it; `required` for one that is not given."""
    head, _, leaf = name.rpartition(".")
    section = OmegaConf.select(config, head) if head else config
    if OmegaConf.is_missing(section, leaf):
        return "required"
    try:
        value = section[leaf]
    except OmegaConfBaseException:  # a reference to no key: shown as it was given
        value = OmegaConf.to_container(section, resolve=False)[leaf]  # type: ignore[index, call-overload]
    if isinstance(value, list | ListConfig):
        return f"[{','.join(map(str, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def program_name() -> str:
    """The command as the user typed it: `train.py`, or `python -m scripts.prepare`."""
    main: Any = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "pytest.__main__"):
        return f"python -m {spec.name.removesuffix('.__main__')}"
    return Path(sys.argv[0]).name


def keys_of(place: str, settings: Any) -> str:
    """The keys behind a file or folder, as `KEY=VALUE`: the nearest folder above it, else all paths below it."""
    above, below = [], []
    for name, info in list_keys(type(settings)).items():
        value = get(settings, name) if info.path is not None else None
        for path in value if isinstance(value, list) else [value]:
            if path is not None and os.path.isabs(path):
                if Path(place).is_relative_to(path) or place.startswith(f"{path}."):  # or a temporary name beside it
                    above.append((len(path), f"{name}={path}"))
                elif Path(path).is_relative_to(place):
                    below.append(f"{name}={path}")
    return max(above)[1] if above else " or ".join(below)


def _report(error: BaseException, every_rank: bool, settings: Any = None) -> None:
    """Print `error: ...` on one line, with the key behind a bad place. every_rank: ranks may see different errors."""
    rank = os.environ.get("RANK", "0")
    place = str(error.filename) if isinstance(error, OSError) and error.filename is not None else ""
    keys = keys_of(place, settings) if place and settings is not None else ""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        where, other = (f" while writing {place}" if place else "", f", or change {keys}" if keys else "")
        message = f"no space left on the disk{where}; free some and start again (resume=auto continues){other}"
    elif isinstance(error, OSError) and place:
        missing = isinstance(error, FileNotFoundError)
        what = "no such file or folder" if missing else (error.strerror or "cannot be used").lower()
        mend = "" if missing else f"; {BAD_PLACE[error.errno or 0]}"
        message = f"{place}: {what}" + (f" ({keys})" if keys else "") + mend
    else:
        message = " ".join(str(error).split())
    if rank == "0":
        print(f"error: {message}", file=sys.stderr)
    elif every_rank:
        print(f"[rank {rank}] error: {message}", file=sys.stderr)
