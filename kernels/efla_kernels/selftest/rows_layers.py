"""The self-test's rows of the layers around the mixers: the convolution and the fused loss."""

from __future__ import annotations

from dataclasses import replace

from efla_kernels.selftest.accuracy import BF16, FP16, FP32
from efla_kernels.selftest.accuracy_layers import ConvolutionCase, LossCase
from efla_kernels.selftest.rows import FIVE, PACKED, Row, make_row

CONVOLUTIONS = {
    "off the strips": ConvolutionCase(),
    "one part, off the channel block": ConvolutionCase(widths=(130,), state=True),
    "whole channel blocks": ConvolutionCase(batch=1, tokens=130, widths=(128, 128, 128), bias=True),
    "two strips and a token": ConvolutionCase(batch=3, tokens=65, widths=(16, 16), bias=True, state=True),
    "whole strips": ConvolutionCase(batch=3, tokens=64, bias=True, state=True),
    "whole strips, three taps, packed": ConvolutionCase(
        batch=1, tokens=64, kernel_size=3, cu_seqlens=(0, 1, 31, 33, 64)
    ),
    "whole strips and channel blocks": ConvolutionCase(batch=1, tokens=96, widths=(128,), bias=True, scaled=True),
    "shorter than the taps": ConvolutionCase(batch=3, tokens=2, widths=(16, 8), bias=True, state=True),
    "one token": ConvolutionCase(tokens=1, bias=True, state=True),
    "three taps": ConvolutionCase(batch=1, kernel_size=3, state=True, bias=True),
    "two taps": ConvolutionCase(batch=1, kernel_size=2, state=True),
    "one tap": ConvolutionCase(batch=1, tokens=9, kernel_size=1, bias=True),
    "packed": ConvolutionCase(batch=1, tokens=PACKED[-1], bias=True, cu_seqlens=PACKED),
    "packed across strips": ConvolutionCase(batch=1, tokens=200, cu_seqlens=(0, 64, 65, 67, 127, 130, 200)),
    "rows with factors": ConvolutionCase(batch=3, tokens=131, bias=True, scaled=True),
    "rows with factors, two taps": ConvolutionCase(tokens=65, kernel_size=2, widths=(130,), scaled=True),
    "rows with factors, one tap": ConvolutionCase(tokens=7, kernel_size=1, widths=(16, 8), scaled=True),
    "rows with factors, three taps, packed": ConvolutionCase(
        batch=1, tokens=PACKED[-1], kernel_size=3, bias=True, cu_seqlens=PACKED, scaled=True
    ),
    "rows with factors, packed": ConvolutionCase(
        batch=1, tokens=200, cu_seqlens=(0, 64, 65, 67, 127, 130, 200), scaled=True
    ),
}
WIDE = {
    "8x2048, 340M, rows with factors": ConvolutionCase(batch=8, tokens=2048, widths=(1024, 1024, 1024), scaled=True),
    "8x2048, 340M": ConvolutionCase(batch=8, tokens=2048, widths=(1024, 1024, 1024)),
    "3x1001, Mamba-2 340M": ConvolutionCase(batch=3, tokens=1001, widths=(2048, 128, 128), bias=True),
    "packed, 256 wide": ConvolutionCase(
        batch=1, tokens=2100, widths=(256, 256, 256), cu_seqlens=(0, 1, 3, 700, 700, 1999, 2100)
    ),
}


def layer_rows() -> list[Row]:
    """The rows for a GPU."""
    rows = []
    for dtype in (BF16, FP16, FP32):
        rows += [make_row(name, replace(case, dtype=dtype)) for name, case in CONVOLUTIONS.items()]
    for name, case in WIDE.items():
        rows += [make_row(name, replace(case, dtype=dtype)) for dtype in (BF16, FP32)]
    for dtype in (BF16, FP16, FP32):
        rows += [make_row("5000x32000", LossCase(dtype)), make_row("17x1001", LossCase(dtype, 17, 64, 1001), FIVE)]
    return [*rows, make_row("2048x8192, wide logits", LossCase(BF16, 2048, 128, 8192, spread=20.0))]


def layer_interpreter_rows() -> list[Row]:
    """Two small rows for Triton's interpreter on a CPU."""
    return [
        make_row("off the strips", CONVOLUTIONS["off the strips"]),
        make_row("20x1001", LossCase(FP32, 20, 16, 1001)),
    ]
