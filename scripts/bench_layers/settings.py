"""Settings of `python -m scripts.bench_layers`: every key with its default and a line of help."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass

from efla_lm.errors import UserError
from efla_lm.settings.fields import PATH, key
from scripts.study.checks import expect_at_least, expect_from

# in the order in which they are measured: what has a target first
LAYERS = ("convolution", "loss", "convolution_mamba2", "residual_norm", "gated_norm", "swiglu", "norm")
# in the order in which they are preferred at equal speed, after plain PyTorch
IMPLEMENTATIONS = ("torch", "compile", "fla", "liger", "cce", "ours")


@dataclass
class LayerBenchSettings:
    """Which layers are timed in which implementations, at which shape, and where the figures go."""

    layers: list[str] = key([*LAYERS], "layers around the token mixers")
    impls: list[str] = key(
        [*IMPLEMENTATIONS],
        "torch (eager), compile (torch.compile), fla, liger (liger-kernel), cce (cut-cross-entropy), ours; "
        "what cannot be imported is named and left out",
    )
    batch: int = key(8, "sequences")
    tokens: int = key(2048, "tokens of each")
    hidden: list[int] = key([1024, 2048], "widths of the residual stream")
    vocabulary: int = key(32000, "rows of the output head")
    dtype: str = key("bf16", "type of the inputs", choices=("bf16", "fp16", "fp32"))
    repeats: int = key(20, "measurements behind each median")
    workers: int = key(12, "processes that compile at once before anything is measured; 0: compile while measuring")
    compile_s: int = key(80, "seconds for that; what is not compiled by then is left out")
    budget_s: int = key(170, "seconds in all after which no further row is started")
    out: str | None = key(None, "the result file; null: results/layers-DATE-TIME.json", path=PATH)
    table: str | None = key(None, "print the table of this result file and stop", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that no measurement can use."""
        expect_from(self, layers=LAYERS, impls=IMPLEMENTATIONS)
        expect_at_least(self, 1, "batch", "tokens", "vocabulary", "repeats", "compile_s", "budget_s")
        expect_at_least(self, 0, "workers")
        if not self.hidden or any(width < 128 or width % 128 for width in self.hidden):
            raise UserError(f"hidden={self.hidden}: expected multiples of 128")
