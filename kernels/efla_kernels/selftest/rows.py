"""The rows of the self-test: the cases that run, and the bounds that each must keep; here those of the delta rules.

16-bit bounds are two to three times what the kernels reach: the tensor cores' operands are rounded to bf16 (2^-9) once
per matmul, whatever the inputs' type. fp32 inputs are multiplied in full precision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from efla_kernels.selftest.accuracy import BF16, DECAY_GRADIENTS, FP16, FP32, LAYOUTS, OPS, Case, Checked
from efla_kernels.selftest.accuracy_decode import DecodeCase

LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 130, 200)
PACKED = (0, 0, 5, 6, 6, 75, 75)
FIVE = (0, 1, 2, 3, 4)
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


@dataclass(frozen=True)
class Row:
    """One row of the table: a case, its seeds, and a factor on the bounds where the case itself is ill-conditioned."""

    name: str
    case: Checked
    seeds: tuple[int, ...] = (0,)
    slack: float = 1.0
    decay_slack: float = 1.0  # on the decay's gradient alone
    backend: str = "triton"

    @property
    def group(self) -> str:
        """Rows of one group share compiled kernels. One worker runs them all, so that it compiles nothing twice."""
        return str(self.case.compiled())

    @property
    def compile_cost(self) -> int:
        """Orders the groups: fp32 matmuls are long unrolled loops, and a split takes four kernels more."""
        case = self.case
        full = 4 if case.dtype == FP32 else 1
        return case.key_width * case.value_width * full * (2 if case.tokens > 1000 else 1)

    def bound(self, output: str) -> float:
        """The largest relative error allowed for one output or gradient."""
        return self.case.bound(output) * self.slack * (self.decay_slack if output in DECAY_GRADIENTS else 1.0)


def make_row(name: str, case: Checked, seeds: tuple[int, ...] = (0,), **options: Any) -> Row:
    """A row named by op, type and `name`."""
    return Row(f"{case.op} {SHORT[case.dtype]} {name}", case, seeds, **options)


def accelerator_rows(full: bool = False) -> list[Row]:
    """The rows for a GPU. fp32 is slow to compile: most of its rows are 64x64, and 256x256 runs with `full` only."""
    rows = []

    def add(name: str, case: Case, seeds: tuple[int, ...] = (0,), slack: float = 1.0, wide: bool = False) -> None:
        if case.dtype == FP32 and not wide:
            case = replace(case, key_width=64, value_width=64)
        rows.append(make_row(name, case, seeds, slack=slack))

    raw_decay = Case("delta_rule", decay="mixed")
    for op in OPS:
        add("main", Case(op), FIVE)
    add("main, decay", raw_decay, FIVE)
    for dtype in (FP16, FP32):
        for op in OPS:
            add("main", Case(op, dtype), FIVE)
    for op in ("gated_deltanet", "gated_efla"):
        add("64x64", Case(op, key_width=64, value_width=64), FIVE)
    for op in ("efla", "gated_deltanet", "gated_efla"):
        add("128x128", Case(op, FP32), FIVE, wide=True)
    for width in ((64, 64), (256, 256), (64, 128), (128, 64), (128, 256), (256, 64)):
        shape = Case("efla", key_width=width[0], value_width=width[1])
        add(f"{width[0]}x{width[1]}", shape, FIVE)
        if width != (64, 64):
            add(f"{width[0]}x{width[1]}", replace(shape, op="gated_efla"))
    if full:
        add("256x256", Case("efla", FP32, key_width=256, value_width=256), wide=True)
    for op in ("efla", "deltanet", "gated_efla"):
        add("32x32", Case(op, key_width=32, value_width=32))
    for width in ((128, 32), (256, 32)):
        add(f"{width[0]}x{width[1]}", Case("gated_efla", key_width=width[0], value_width=width[1]))
    add("split, 32x32, 1x4133", Case("efla", key_width=32, value_width=32, tokens=4133, heads=1))
    # the bytes of these rows are odd multiples: tensor descriptors and vector loads cannot take them
    add("36x20", Case("gated_efla", key_width=36, value_width=20))
    for op in ("efla", "gated_efla"):
        for dtype in (BF16, FP32):
            for norm in (1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0, None):
                name = "1e-2..1e2" if norm is None else f"{norm:g}"
                add(f"|k| {name}", Case(op, dtype, key_norm=norm, initial=False))
                # dlog_g is a difference of two large terms here: rounding v or k to bf16 moves its exact value by 5e-3
                # (|k| 10) to 2e-2 (|k| 1000), while the other gradients move by 1e-3
                if op == "gated_efla" and dtype == BF16 and norm in (10.0, 100.0, 1000.0):
                    rows[-1] = replace(rows[-1], decay_slack=2.5)
    for op, norm in (("efla", 1.0), ("efla", 64.0), ("gated_efla", 8.0), ("deltanet", 1.0)):
        for dtype in (BF16, FP32):
            near = Case(op, dtype, key_norm=norm, keys="near", initial=False)
            add(f"near-duplicate keys, |k| {norm:g}", near, slack=4.0)
    for op in ("gated_deltanet", "gated_efla"):
        for decay in ("1", "0.99..1", "0.5", "1e-4", "1e-20", "0", "0 or 1"):
            add(f"g {decay}", Case(op, decay=decay))
        for decay in ("1", "0", "0 or 1"):
            add(f"g {decay}", Case(op, FP32, decay=decay))
    for tokens in LENGTHS:
        add(f"T {tokens}", Case("efla", batch=2, tokens=tokens, initial=False))
        add(f"T {tokens}, initial state", Case("gated_efla", batch=2, tokens=tokens))
        add(f"T {tokens}", Case("efla", FP32, batch=2, tokens=tokens))
    packed = {"cu_seqlens": PACKED, "tokens": PACKED[-1]}
    for op in OPS:
        add("packed", Case(op, **packed))  # type: ignore[arg-type]
    add("packed, decay", replace(raw_decay, cu_seqlens=PACKED, tokens=PACKED[-1]))
    add("packed", Case("efla", FP32, **packed))  # type: ignore[arg-type]
    add("packed", Case("gated_efla", FP32, **packed))  # type: ignore[arg-type]
    for op in ("efla", "deltanet", "gated_deltanet", "gated_efla"):
        add("split, 1x4133", Case(op, tokens=4133, heads=1))
    add("split, decay, 1x4133", replace(raw_decay, tokens=4133, heads=1))
    add("split, no initial state, 1x8192", Case("efla", tokens=8192, heads=1, initial=False, final=False))
    add("split, 1x2100", Case("efla", FP32, tokens=2100, heads=1))
    add("split, 1x2100", Case("gated_efla", FP32, tokens=2100, heads=1))
    for rule in ("deltanet", "efla", "gated_deltanet", "gated_efla"):
        for dtype in (BF16, FP32):
            rows.append(make_row("decode", DecodeCase(rule, dtype), FIVE))
    for size in (64, 256):
        rows.append(make_row(f"decode {size}x{size}", DecodeCase("gated_efla", key_width=size, value_width=size)))
    for K, V in ((128, 128), (64, 128), (256, 64), (72, 100)):  # more programs than multiprocessors
        step = DecodeCase("gated_efla", batch=64, key_width=K, value_width=V)
        rows.append(make_row(f"decode {K}x{V}, batch 64", step))
    for op in ("efla", "gated_efla"):
        for name, case, seeds in (("", Case(op), FIVE), (", split, 1x4133", Case(op, tokens=4133, heads=1), (0,))):
            rows.append(make_row(f"states computed again{name}", case, seeds, backend="triton_recompute"))
        add("no gradient", Case(op, gradients=False))
        add("strided", Case(op, strided=True))
        for layout in list(LAYOUTS)[1:]:
            add(f"{layout} gradients", Case(op, layout=layout))
        add("8x1024, H 8", Case(op, batch=8, tokens=1024, heads=8, initial=False, final=False))
    return rows


def interpreter_rows() -> list[Row]:
    """A few small rows for Triton's interpreter on a CPU, in fp32: the interpreter multiplies bf16 wrongly."""
    small = Case("efla", FP32, tokens=130, heads=1, key_width=32, value_width=32)
    cases = {
        "T 130": [replace(small, op=op) for op in OPS],
        "packed": [replace(small, op="gated_efla", tokens=PACKED[-1], cu_seqlens=PACKED)],
        "|k| 100": [replace(small, key_norm=100.0, tokens=65)],
        "K 16, V 64": [replace(small, key_width=16, value_width=64, tokens=65)],
    }
    rows = [make_row(name, case) for name, listed in cases.items() for case in listed]
    return [*rows, make_row("decode", DecodeCase("gated_efla", FP32, key_width=32, value_width=32))]
