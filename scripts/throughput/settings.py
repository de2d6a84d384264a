"""Settings of `python -m scripts.throughput`: every key with its default and a line of help."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass

from efla_lm.errors import UserError
from efla_lm.models.rules import RULES
from efla_lm.settings.compose import CONFIG_DIR
from efla_lm.settings.fields import PATH, key
from scripts.study.checks import expect_at_least, expect_from, parse_shapes

MODELS = tuple(rule.option for rule in RULES.values())
PAPER_MODELS = tuple(rule.option for name, rule in RULES.items() if rule.op in (name, None))
IMPLEMENTATIONS = ("efla_lm", "fla")
PEERS = tuple(rule.option for rule in RULES.values() if rule.fla)
STARTED = 4  # the step whose end is the end of starting up
SIZES = sorted(path.stem for path in (CONFIG_DIR / "size").glob("*.yaml"))
MODES = ("auto", "single", "ddp", "fsdp", "hsdp")


@dataclass
class ThroughputSettings:
    """Which training steps are timed, how long, and where the figures go. The default is the paper's Figure 4."""

    models: list[str] = key([*PAPER_MODELS], "options of conf/model")
    sizes: list[str] = key(["340m", "1b3"], "options of conf/size")
    shapes: list[str] = key(
        ["8x2048", "4x4096", "2x8192", "1x16384", "32x2048"], "sequences x tokens of each device's batch"
    )
    impls: list[str] = key(
        [*IMPLEMENTATIONS], "efla_lm: train.py's parts; fla: flash-linear-attention in flame's set-up, where it runs"
    )
    gpus: int = key(1, "processes on this machine, a device each; more than one are started by torchrun")
    modes: list[str] = key(["auto"], "parallel.mode of each point")
    vocab_size: int = key(32000, "ids of the random text and rows of the embedding")
    train: list[str] = key([], "more overrides for train.py's settings, quoted: \"train=['train.compile=false']\"")
    peer_waits: bool = key(True, "fla: the host reads norm and loss in every step, as in flame's recipes")
    warmup: int = key(8, "steps before the clock starts; the start-up time ends with the fourth of all")
    windows: int = key(3, "spans of time; their median counts")
    updates: int = key(10, "steps in a span; the device takes the time, so that the host never waits for it")
    profile: int = key(0, "steps traced after the clock; the row's `where` has milliseconds per step by kind")
    caches: str = key(
        "empty",
        "empty: each point compiles from nothing, as on a new machine; kept: this machine's caches are used, added to",
        choices=("empty", "kept"),
    )
    at_once: int = key(
        1, "points that start up side by side on one GPU; after its first step each has the GPU to itself"
    )
    limit_s: int = key(240, "seconds after which a point is given up, waiting for its turn (at_once) included")
    budget_s: int | None = key(None, "seconds after which no further point is started; null: all run")
    redo: bool = key(True, "measure again what `out` has already")
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    out: str | None = key(None, "result file, added to if there; null: results/throughput-DATE-TIME.json", path=PATH)
    table: str | None = key(None, "print the table of this result file, draw its plot beside it, and stop", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that no measurement can use."""
        expect_from(self, models=MODELS, sizes=SIZES, impls=IMPLEMENTATIONS, modes=MODES)
        parse_shapes(self.shapes)
        expect_at_least(self, 1, "gpus", "windows", "updates", "at_once", "limit_s", "vocab_size", "budget_s")
        if self.at_once > 1 and self.gpus > 1:
            raise UserError(f"at_once={self.at_once} gpus={self.gpus}: points of several GPUs run one after the other")
        if self.warmup < STARTED:
            raise UserError(f"warmup={self.warmup}: expected at least {STARTED}, where the start-up time is taken")
