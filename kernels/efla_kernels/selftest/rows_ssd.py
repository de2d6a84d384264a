"""The self-test's rows of Mamba-2: the models' widths, steps at both ends, lengths, packing, decoding."""

from __future__ import annotations

from dataclasses import replace

from efla_kernels.selftest.accuracy_ssd import SsdCase
from efla_kernels.selftest.rows import BF16, FIVE, FP16, FP32, LENGTHS, PACKED, Row, _short


def _row(name: str, case: SsdCase, seeds: tuple[int, ...] = (0,), backend: str = "triton") -> Row:
    flags = (case.cu_seqlens is not None, case.initial, case.final, case.strided, case.masked, case.heads, case.groups)
    group = str((case.op, case.dtype, case.key_width, case.value_width, case.tokens > 1000, flags))
    return Row(f"{case.op} {_short(case.dtype)} {name}", case, seeds, group=group, backend=backend)


def ssd_rows() -> list[Row]:
    """The rows for a GPU: N = 128, P = 64 as the models have them; fp32, which is slow to compile, mostly at 32."""
    rows = []
    for op in ("mamba2", "ssd"):
        rows += [_row("main", SsdCase(op), FIVE), _row("main", SsdCase(op, FP16), FIVE)]
        narrow = SsdCase(op, FP32, key_width=32, value_width=32)
        rows += [_row("32x32", narrow, FIVE), _row("128x64", SsdCase(op, FP32))]
        for case in (SsdCase(op), narrow):
            rows += [_row("packed", replace(case, cu_seqlens=PACKED, tokens=PACKED[-1]))]
        rows += [_row(f"steps {ends}", SsdCase(op, steps=ends)) for ends in ("tiny", "large", "0 or large")]
    main = SsdCase("mamba2")
    for tokens in LENGTHS:
        rows += [_row(f"T {tokens}", SsdCase("mamba2", batch=2, tokens=tokens))]
    for tokens in (127, 129, 257):
        rows += [_row(f"T {tokens}, no states", SsdCase("mamba2", batch=2, tokens=tokens, initial=False, final=False))]
    for groups in (2, 4):
        rows += [_row(f"G {groups}", replace(main, groups=groups))]
    for N, P in ((64, 64), (128, 128), (64, 128), (256, 64), (16, 64), (36, 20)):
        rows += [_row(f"{N}x{P}", replace(main, key_width=N, value_width=P))]
    rows += [
        _row("padding", replace(main, masked=True)),
        _row("strided", replace(main, batch=2, strided=True)),
        *(
            _row(f"{layout} gradients", replace(main, layout=layout))
            for layout in ("transposed", "strided", "expanded", "one number")
        ),
        _row("H 6", replace(main, heads=6, groups=2)),
        _row("no gradient", replace(main, gradients=False)),
        _row("8x1024, H 32", SsdCase("mamba2", batch=8, tokens=1024, heads=32, initial=False, final=False)),
        _row("split, 1x4133", SsdCase("mamba2", tokens=4133, heads=2)),
        _row("split, 1x8192, no states", SsdCase("mamba2", tokens=8192, heads=8, initial=False, final=False)),
        _row("recomputed states", SsdCase("mamba2", tokens=4133, heads=2), backend="triton_recompute"),
    ]
    for dtype in (BF16, FP32):
        step = SsdCase("mamba2_step", dtype, batch=3, heads=4, groups=2)
        rows += [_row("decode", step, FIVE), _row("decode, padding", replace(step, masked=True))]
    return [*rows, _row("decode, H 32, 64 rows", SsdCase("mamba2_step", batch=64, heads=32))]


def ssd_interpreter_rows() -> list[Row]:
    """Two small ones, for Triton's interpreter on a CPU."""
    small = SsdCase("mamba2", FP32, tokens=70, heads=2, key_width=32, value_width=16)
    return [_row("T 70", small), _row("decode", replace(small, op="mamba2_step"))]
