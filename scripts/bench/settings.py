"""Settings of `python -m scripts.bench`: every key with its default and a line of help."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass

from efla_lm.errors import UserError
from efla_lm.models.rules import RULES
from efla_lm.settings.fields import PATH, key
from scripts.study.checks import expect_at_least, expect_from, parse_shapes

OPS = tuple(name for name, rule in RULES.items() if rule.op == name)
WIDEST = 256  # heads that our kernels take
IMPLEMENTATIONS = ("ours", "ours_recompute", "fla", "torch", "mamba_ssm")


@dataclass
class BenchSettings:
    """What is measured, how often, and where it goes. The default is the set of shapes that the project is held to."""

    ops: list[str] = key([*OPS], "token mixers")
    impls: list[str] = key(
        ["ours", "ours_recompute", "fla", "torch"],
        "ours, ours_recompute (chunk states computed again; forward + backward), fla (flash-linear-attention), torch "
        "(our chunked PyTorch), mamba_ssm (mamba2 only)",
    )
    mamba_ssm: str | None = key(None, "folder with mamba-ssm's sources, for impls=[...,mamba_ssm]", path=PATH)
    shapes: list[str] = key(["8x2048", "4x4096", "2x8192", "1x16384"], "batch x tokens; torch takes the first only")
    heads: list[int] = key([8, 16], "heads; mamba2 takes four times as many, its heads at the same hidden size")
    width: int = key(128, "width of keys and values; of mamba2's state, whose heads are half as wide")
    dtype: str = key("bf16", "type of the inputs", choices=("bf16", "fp16", "fp32"))
    directions: list[str] = key(["fwd", "fwd_bwd", "decode"], "fwd, fwd_bwd, decode")
    decode_batches: list[int] = key([1, 64], "batch sizes of the decoding step")
    decode_layers: int = key(
        24, "decoding steps in one measurement, each with states of its own; more where these would fit the L2 cache"
    )
    seeds: int = key(5, "seeds 0, 1, ... whose worst error is reported")
    repeats: int = key(30, "measurements behind each median")
    workers: int = key(12, "processes that compile at once before anything is measured; 0: compile while measuring")
    out: str | None = key(None, "the result file; null: results/ops-DATE-TIME.json", path=PATH)
    table: str | None = key(None, "print the table of this result file, draw its plot beside it, and stop", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that no measurement can use."""
        expect_from(self, ops=OPS, impls=IMPLEMENTATIONS, directions=("fwd", "fwd_bwd", "decode"))
        if "mamba_ssm" in self.impls and not (self.mamba_ssm or self.table):
            raise UserError("impls: mamba_ssm needs the folder with its sources, mamba_ssm=FOLDER")
        if self.impls == ["mamba_ssm"] and "mamba2" not in self.ops:
            raise UserError(f"impls=[mamba_ssm] has none of ops={self.ops}: expected mamba2 among them")
        if self.impls == ["ours_recompute"] and "fwd_bwd" not in self.directions:
            raise UserError(f"impls=[ours_recompute] has none of directions={self.directions}: expected fwd_bwd")
        parse_shapes(self.shapes)
        expect_at_least(self, 1, "heads", "decode_batches", "seeds", "repeats", "decode_layers")
        expect_at_least(self, 0, "workers")
        if self.width % 2 or not 2 <= self.width <= WIDEST:
            raise UserError(f"width={self.width}: expected an even number up to {WIDEST}")
