"""Settings of `python -m scripts.bench`: every key with its default and a line of help."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass

from efla_lm.errors import UserError
from efla_lm.settings.fields import PATH, key

OPS = ("efla", "deltanet", "gated_deltanet", "gated_efla", "mamba2")
IMPLEMENTATIONS = ("ours", "fla", "torch", "mamba_ssm")


@dataclass
class BenchSettings:
    """What is measured, how often, and where it goes. The default is the set of shapes that the project is held to."""

    ops: list[str] = key([*OPS], "token mixers")
    impls: list[str] = key(
        ["ours", "fla", "torch"],
        "ours, fla (flash-linear-attention), torch (our chunked PyTorch), mamba_ssm (mamba2 only)",
    )
    mamba_ssm: str | None = key(None, "folder with mamba-ssm's sources, for impls=[...,mamba_ssm]", path=PATH)
    shapes: list[str] = key(["8x2048", "4x4096", "2x8192", "1x16384"], "batch x tokens; torch takes the first only")
    heads: list[int] = key([8, 16], "heads; mamba2 takes four times as many, its heads at the same hidden size")
    width: int = key(128, "width of keys and values; of mamba2's state, whose heads are half as wide")
    dtype: str = key("bf16", "type of the inputs", choices=("bf16", "fp16", "fp32"))
    directions: list[str] = key(["fwd", "fwd_bwd", "decode"], "fwd, fwd_bwd, decode")
    decode_batches: list[int] = key([1, 64], "batch sizes of the decoding step")
    seeds: int = key(5, "seeds 0, 1, ... whose worst error is reported")
    repeats: int = key(30, "measurements behind each median")
    workers: int = key(12, "processes that compile at once before anything is measured; 0: compile while measuring")
    out: str | None = key(None, "the result file; null: results/ops-DATE-TIME.json", path=PATH)
    table: str | None = key(None, "print the table of this result file, draw its plot beside it, and stop", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that nothing can be measured with."""
        allowed = {"ops": OPS, "impls": IMPLEMENTATIONS, "directions": ("fwd", "fwd_bwd", "decode")}
        for name, values in allowed.items():
            wrong = [x for x in getattr(self, name) if x not in values]
            if wrong:
                raise UserError(f"{name}={wrong}: expected a list from {', '.join(values)}")
        if "mamba_ssm" in self.impls and not (self.mamba_ssm or self.table):
            raise UserError("impls: mamba_ssm needs the folder with its sources, mamba_ssm=FOLDER")
        for shape in self.shapes:
            parts = shape.split("x")
            if len(parts) != 2 or not all(p.isdigit() and int(p) > 0 for p in parts):
                raise UserError(f"shapes: expected BATCHxTOKENS such as 8x2048, got {shape!r}")
        for name in ("seeds", "repeats", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: expected at least 1")

    def pairs(self) -> list[tuple[int, int]]:
        """The shapes as (batch, tokens)."""
        return [(int(b), int(t)) for b, t in (shape.split("x") for shape in self.shapes)]
