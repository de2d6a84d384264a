"""Settings of the commands that say what training costs, and that train a whole table."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass

from efla_lm.errors import UserError
from efla_lm.settings.fields import PATH, key
from efla_lm.settings.schema import TrainSettings
from scripts.plan.cost import GPUS
from scripts.study.checks import expect_above_zero, expect_at_least

GPU_NAMES = tuple(GPUS)


@dataclass
class PlanSettings(TrainSettings):
    """All of `python -m scripts.plan`: the recipe as train.py takes it, and the machine."""

    gpus: int = key(8, "devices")
    gpu: str = key("h200-141gb", "kind of device", choices=GPU_NAMES)
    mfu: float | None = key(None, "model FLOPs utilisation to assume; null: as measured, else assumed")
    efficiency: float = key(0.95, "share of its speed that a device keeps beside others of its machine (assumed)")
    network: float = key(50.0, "GB/s into and out of a machine of 8 devices (assumed: 400 Gb/s)")
    margin: float = key(0.08, "share of the memory left free for the CUDA context and fragmentation")
    price: float | None = key(None, "price of a GPU-hour; null: none is shown")

    def validate(self) -> None:
        """Check values against each other; raises UserError. Called once by `compose` and `entry`."""
        super().validate()
        expect_above_zero(self, "network")
        check_machine(self, self.margin)


@dataclass
class ReproduceSettings:
    """All of `python -m scripts.reproduce_table1`."""

    size: str = key("340m", "size of all models (conf/size); the recipe is experiment=table1_SIZE where there is one")
    models: list[str] | None = key(None, "options of conf/model; null: those of the paper's table at this size")
    seeds: list[int] = key([42], "one run of each model per seed [paper: 42]")
    gpus: int = key(8, "devices of this machine; more than one are launched by torchrun")
    gpu: str = key("h200-141gb", "kind of device, for the forecast", choices=GPU_NAMES)
    runs_dir: str = key("runs", "folder of the run directories table1-SIZE-MODEL-seedN", path=PATH)
    data_dir: str | None = key(None, "token files of all runs; null: those of the recipe's corpus", path=PATH)
    local_dir: str | None = key(None, "folder of local copies of the tasks; null: the hub", path=PATH)
    out: str = key("results/table1", "folder of the table", path=PATH)
    train: list[str] = key([], "more overrides for every train.py, quoted: \"train=['train.micro_batch=16']\"")
    eval: list[str] = key([], "more overrides for every eval.py, quoted: \"eval=['dtype=bf16']\"")
    mfu: float | None = key(None, "model FLOPs utilisation to assume in the forecast")
    efficiency: float = key(0.95, "share of its speed that a device keeps beside others of its machine (assumed)")
    price: float | None = key(None, "price of a GPU-hour; null: none is shown")
    dry_run: bool = key(False, "print the forecast and the commands, run nothing")

    def validate(self) -> None:
        """Check values against each other; raises UserError. Called once by `compose` and `entry`."""
        check_machine(self)
        if self.models == []:
            raise UserError("models=[]: expected at least one of conf/model, or null")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds={self.seeds}: expected at least one seed, each once")


def check_machine(settings: PlanSettings | ReproduceSettings, margin: float = 0.0) -> None:
    """Ranges of what describes the machine. Raises UserError."""
    expect_at_least(settings, 1, "gpus")
    for name in ("mfu", "efficiency"):
        value = getattr(settings, name)
        if value is not None and not 0 < value <= 1:
            raise UserError(f"{name}={value}: expected above 0 and at most 1")
    if not 0 <= margin < 1:
        raise UserError(f"margin={margin}: expected from 0 to below 1")
    if settings.price is not None and settings.price < 0:
        raise UserError(f"price={settings.price}: expected 0 or more, or null")
