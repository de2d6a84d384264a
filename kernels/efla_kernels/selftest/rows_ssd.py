"""The self-test's rows of Mamba-2: the models' widths, steps at both ends, lengths, packing, decoding."""

from __future__ import annotations

from dataclasses import replace

from efla_kernels.selftest.accuracy import BF16, FP16, FP32, LAYOUTS
from efla_kernels.selftest.accuracy_ssd import SsdCase
from efla_kernels.selftest.rows import FIVE, LENGTHS, PACKED, Row, make_row


def ssd_rows() -> list[Row]:
    """The rows for a GPU, at the models' N = 128 and P = 64. fp32 is slow to compile and mostly at 32x32."""
    rows = []
    for op in ("mamba2", "ssd"):
        rows += [make_row("main", SsdCase(op), FIVE), make_row("main", SsdCase(op, FP16), FIVE)]
        narrow = SsdCase(op, FP32, key_width=32, value_width=32)
        rows += [make_row("32x32", narrow, FIVE), make_row("128x64", SsdCase(op, FP32))]
        for case in (SsdCase(op), narrow):
            rows += [make_row("packed", replace(case, cu_seqlens=PACKED, tokens=PACKED[-1]))]
        rows += [make_row(f"steps {ends}", SsdCase(op, steps=ends)) for ends in ("tiny", "large", "0 or large")]
    main = SsdCase("mamba2")
    for tokens in LENGTHS:
        rows += [make_row(f"T {tokens}", SsdCase("mamba2", batch=2, tokens=tokens))]
    for tokens in (127, 129, 257):
        case = SsdCase("mamba2", batch=2, tokens=tokens, initial=False, final=False)
        rows += [make_row(f"T {tokens}, no states", case)]
    for groups in (2, 4):
        rows += [make_row(f"G {groups}", replace(main, groups=groups))]
    for N, P in ((64, 64), (128, 128), (64, 128), (256, 64), (16, 64), (36, 20)):
        rows += [make_row(f"{N}x{P}", replace(main, key_width=N, value_width=P))]
    rows += [
        make_row("padding", replace(main, masked=True)),
        make_row("strided", replace(main, batch=2, strided=True)),
        *(make_row(f"{layout} gradients", replace(main, layout=layout)) for layout in list(LAYOUTS)[1:]),
        make_row("H 6", replace(main, heads=6, groups=2)),
        make_row("no gradient", replace(main, gradients=False)),
        make_row("8x1024, H 32", SsdCase("mamba2", batch=8, tokens=1024, heads=32, initial=False, final=False)),
        make_row("split, 1x4133", SsdCase("mamba2", tokens=4133, heads=2)),
        make_row("split, 1x8192, no states", SsdCase("mamba2", tokens=8192, heads=8, initial=False, final=False)),
        make_row("recomputed states", SsdCase("mamba2", tokens=4133, heads=2), backend="triton_recompute"),
    ]
    for dtype in (BF16, FP32):
        step = SsdCase("mamba2_step", dtype, batch=3, heads=4, groups=2)
        rows += [make_row("decode", step, FIVE), make_row("decode, padding", replace(step, masked=True))]
    return [*rows, make_row("decode, H 32, 64 rows", SsdCase("mamba2_step", batch=64, heads=32))]


def ssd_interpreter_rows() -> list[Row]:
    """Two small rows for Triton's interpreter on a CPU."""
    small = SsdCase("mamba2", FP32, tokens=70, heads=2, key_width=32, value_width=16)
    return [make_row("T 70", small), make_row("decode", replace(small, op="mamba2_step"))]
