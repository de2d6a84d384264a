"""Settings: typed keys, their composition from `conf/` and the command line, and the frame of an entry point.

    from efla_lm.settings import TrainSettings, compose, entry

    settings = compose("train", ["model=deltanet", "size=340m", "train.steps=10"], TrainSettings)

    @entry("train", TrainSettings)
    def main(settings: TrainSettings) -> int | None: ...

A new settings class is a dataclass whose fields are declared with `key(default, help, choices=..., path=...)`, with a
`validate` method for checks. `entry("eval", EvalSettings)` makes a command of it. A command whose settings have groups
(`model=efla`) names them in the defaults list of `conf/eval.yaml`; other commands need no file.
"""

from efla_lm.settings.cli import EntryPoint, entry
from efla_lm.settings.command_line import UsageError
from efla_lm.settings.compose import compose, load_settings, to_dict, to_yaml
from efla_lm.settings.data import DataSettings, PrepareSettings
from efla_lm.settings.fields import MISSING, PATH, PATH_OR_HUB, PathRule, key, list_keys
from efla_lm.settings.output_path import check_output
from efla_lm.settings.schema import (
    ExportSettings,
    LiveEvalSettings,
    LoggerSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    ParallelSettings,
    ScheduleSettings,
    SizeSettings,
    TrainSettings,
)

__all__ = [
    "MISSING",
    "PATH",
    "PATH_OR_HUB",
    "DataSettings",
    "EntryPoint",
    "ExportSettings",
    "LiveEvalSettings",
    "LoggerSettings",
    "LoopSettings",
    "ModelSettings",
    "OptimSettings",
    "ParallelSettings",
    "PathRule",
    "PrepareSettings",
    "ScheduleSettings",
    "SizeSettings",
    "TrainSettings",
    "UsageError",
    "check_output",
    "compose",
    "entry",
    "key",
    "list_keys",
    "load_settings",
    "to_dict",
    "to_yaml",
]
