"""The convolution's kernels as a registered op, and their block shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from efla_kernels.launch.arguments import power_of_two, rows_in_place
from efla_kernels.launch.op import Autograd, register, traced, wants_gradient
from efla_kernels.layers.convolution_kernels import convolution_gradient_kernel, convolution_kernel
from efla_kernels.layers.convolution_torch import Inputs

PARTS = 3
SHORTEST = 32  # tokens of a strip in the backward pass: a strip also reads 3 tokens of the next one, a tenth
FEWEST_PROGRAMS = 1056  # of one warp: 8 per multiprocessor of an H200, half of what its registers hold


class Block(NamedTuple):
    """Tokens of a strip (in the backward pass at most), strips and channels of a program, warps, pipeline stages."""

    strip: int
    rows: int
    channels: int
    warps: int
    stages: int = 1


FORWARD = Block(strip=64, rows=2, channels=128, warps=2)
BACKWARD = Block(strip=512, rows=1, channels=128, warps=1, stages=4)


class Outputs(NamedTuple):
    """The parts y [B, T, width]; empty from len(widths) on."""

    first: Tensor
    second: Tensor
    third: Tensor


class OutputGradients(NamedTuple):
    """Gradients of the parts, contiguous."""

    first: Tensor
    second: Tensor
    third: Tensor


class Gradients(NamedTuple):
    """Gradients of the inputs; bias and state are empty where there is none."""

    x: Tensor
    weight: Tensor  # fp32
    bias: Tensor  # fp32
    state: Tensor


def strip_of(block: Block, B: int, T: int, blocks: int) -> int:
    """Tokens of a strip of the backward pass, for B rows of T tokens in `blocks` blocks of channels.

    Long strips make the table of sums small and read few tokens twice. Short ones give more programs, which hide each
    other's waits for memory. This is the longest strip that leaves `FEWEST_PROGRAMS`.
    """
    strip = block.strip
    while strip > SHORTEST and B * -(-T // strip) * blocks < FEWEST_PROGRAMS:
        strip //= 2
    return _no_longer(strip, T)


def _no_longer(strip: int, T: int) -> int:
    return min(strip, max(4, power_of_two(T)))


def _arguments(i: Inputs, block: Block) -> tuple[list[Tensor], dict[str, Any]]:
    """The tensors that both kernels read, with x or weight as placeholders for absent ones, and the constants."""
    x, weight = rows_in_place(i.x), i.weight.contiguous()
    D0, D1, D2 = (*i.widths, *[0] * (PARTS - len(i.widths)))
    tensors = [
        x, weight, weight if i.bias is None else i.bias, x if i.state is None else i.state.contiguous(),
        x if i.starts is None else i.starts, x if i.row_scale is None else i.row_scale.contiguous(),
    ]  # fmt: skip
    return tensors, {
        "stride": x.stride(1), "D0": D0, "D1": D1, "D2": D2, "W": weight.shape[1], "BLOCK": block.channels,
        "BLOCKS": sum(-(-width // block.channels) for width in i.widths),
        "EVEN": all(width % block.channels == 0 for width in i.widths),
        "BIAS": i.bias is not None, "STATE": i.state is not None, "PACKED": i.starts is not None,
        "SCALED": i.row_scale is not None, "num_warps": block.warps,
    }  # fmt: skip


def _parts(i: Inputs, parts: tuple[Tensor, ...]) -> list[Tensor]:
    """Three parts for a kernel, the first as the placeholder for absent ones."""
    count = len(i.widths)
    return [*parts[:count], *[parts[0]] * (PARTS - count)]


def _padded(i: Inputs, parts: list[Tensor]) -> Outputs:
    return Outputs(*parts, *(i.x.new_empty(0) for _ in range(PARTS - len(parts))))


def _fake(i: Inputs) -> Outputs:
    return _padded(i, [i.x.new_empty(i.x.shape[0], i.x.shape[1], width) for width in i.widths])


def _forward(i: Inputs) -> Outputs:
    B, T, _ = i.x.shape
    out = _fake(i)
    tensors, constants = _arguments(i, FORWARD)
    strip = _no_longer(FORWARD.strip, T)
    strips = B * -(-T // strip)
    rows = min(FORWARD.rows, power_of_two(strips))
    convolution_kernel[(-(-strips // rows) * constants["BLOCKS"],)](
        *tensors, *_parts(i, out), T, strips, STRIP=strip, ROWS=rows, **constants
    )
    return out


def _keep(i: Inputs, out: Outputs) -> Inputs:
    return i


def _backward(d: OutputGradients, i: Inputs) -> Gradients:
    B, T, D = i.x.shape
    tensors, constants = _arguments(i, BACKWARD)
    strip = strip_of(BACKWARD, B, T, constants["BLOCKS"])
    strips = B * -(-T // strip)
    fp32: dict[str, Any] = {"dtype": torch.float32}
    dx, table = i.x.new_empty(B, T, D), i.x.new_empty(strips, D, constants["W"], **fp32)
    bias_table = i.x.new_empty((strips, D) if i.bias is not None else 0, **fp32)
    d_state = i.x.new_empty(0) if i.state is None else torch.zeros_like(i.state, memory_format=torch.contiguous_format)
    convolution_gradient_kernel[(strips * constants["BLOCKS"],)](
        *tensors, *_parts(i, d), dx, d_state, table, bias_table, T, STRIP=strip, STAGES=BACKWARD.stages,
        WHOLE=T % strip == 0, **constants,
    )  # fmt: skip
    return Gradients(dx, table.sum(0), bias_table if i.bias is None else bias_table.sum(0), d_state)


def _backward_fake(d: OutputGradients, i: Inputs) -> Gradients:
    fp32: dict[str, Any] = {"dtype": torch.float32}
    return Gradients(
        x=i.x.new_empty(i.x.shape),
        weight=i.weight.new_empty(i.weight.shape, **fp32),
        bias=i.weight.new_empty(0 if i.bias is None else i.bias.shape, **fp32),
        state=i.x.new_empty(0 if i.state is None else i.state.shape),
    )


convolution = register("convolution", _forward, _fake, Autograd(_keep, _backward, _backward_fake))


class _LastApart(torch.autograd.Function):
    """The op twice, for the last part and for the others, with one backward op.

    Where the backward pass of a layer recomputes some of the parts, it runs the op of those alone.
    """

    @staticmethod
    def forward(ctx: Any, *flat: Any) -> tuple[Tensor, ...]:
        i = Inputs(*flat)
        cut = sum(i.widths[:-1])
        parts: list[Tensor] = []
        for channels, widths in ((slice(0, cut), i.widths[:-1]), (slice(cut, None), i.widths[-1:])):
            some = convolution.op(
                i.x[..., channels], i.weight[channels], None if i.bias is None else i.bias[channels],
                None if i.state is None else i.state[..., channels], i.starts, i.row_scale, widths,
            )  # fmt: skip
            parts += some[: len(widths)]
        out = tuple(_padded(i, parts))
        convolution.setup(ctx, flat, out)
        return out

    @staticmethod
    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return convolution.gradient(ctx, *dy)


def convolve(i: Inputs, last_apart: bool) -> tuple[Tensor, ...]:
    """The parts y; last_apart: see `short_convolution`."""
    apart = last_apart and len(i.widths) > 1 and traced() and wants_gradient(i)
    parts = _LastApart.apply(*i) if apart else convolution(i)
    return parts[: len(i.widths)]
