"""The convolution group's kernels as torch.library ops (fake tensors and autograd included), and their block shapes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from efla_kernels.launch.arguments import rows_in_place
from efla_kernels.launch.op import differentiable, traced, wants_gradient
from efla_kernels.layers.convolution_kernels import convolution_gradient_kernel, convolution_kernel

PARTS = 3
SHORTEST = 32  # tokens of a strip in the backward pass: the 3 of the next one that it reads as well are a tenth
FEWEST_PROGRAMS = 1056  # of one warp: 8 on each of an H200's multiprocessors, half of what its registers take


class Block(NamedTuple):
    """Tokens of a strip (backwards the most), strips and channels of a program, warps, stages of its loop."""

    strip: int
    rows: int
    channels: int
    warps: int
    stages: int = 1


FORWARD = Block(strip=64, rows=2, channels=128, warps=2)
BACKWARD = Block(strip=512, rows=1, channels=128, warps=1, stages=4)


def strip_of(block: Block, B: int, T: int, blocks: int) -> int:
    """Tokens of a strip of the backward pass, for B rows of T tokens in `blocks` blocks of channels.

    Long strips spare the table of sums and the tokens that two strips read, but a loop that waits for memory needs
    other programs beside it: the longest strip of which there are enough.
    """
    strip = block.strip
    while strip > SHORTEST and B * -(-T // strip) * blocks < FEWEST_PROGRAMS:
        strip //= 2
    return _no_longer(strip, T)


def _no_longer(strip: int, T: int) -> int:
    return min(strip, max(4, triton.next_power_of_2(T)))


def _flags(block: Block, widths: list[int], W: int) -> dict[str, Any]:
    """Constants of a launch that both directions have."""
    D0, D1, D2 = (*widths, *[0] * (PARTS - len(widths)))
    return {
        "D0": D0, "D1": D1, "D2": D2, "W": W, "BLOCK": block.channels,
        "BLOCKS": sum(-(-width // block.channels) for width in widths),
        "EVEN": all(width % block.channels == 0 for width in widths), "num_warps": block.warps,
    }  # fmt: skip


def _operands(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, starts: Tensor | None, scale: Tensor | None
) -> tuple[list[Tensor], dict[str, Any]]:
    """What the kernels of both directions read, something in the place of what is not there, and which of it is."""
    tensors = [
        x, weight, weight if bias is None else bias, x if state is None else state.contiguous(),
        x if starts is None else starts, x if scale is None else scale.contiguous(),
    ]  # fmt: skip
    there = {
        "BIAS": bias is not None, "STATE": state is not None, "PACKED": starts is not None, "SCALED": scale is not None
    }  # fmt: skip
    return tensors, {"stride": x.stride(1), **there}


def _three(parts: list[Tensor]) -> list[Tensor]:
    return [*parts, *[parts[0]] * (PARTS - len(parts))]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    scale: Tensor | None,
    widths: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The parts y [B, T, width] of the convolution of x [B, T, D], empty where there are fewer than three.

    Arguments as `short_convolution` checked them; starts: int32 [T], the first token of each token's document, for
    packed rows; scale: fp32 [B, T], the rows' factors.
    """
    x, weight = rows_in_place(x), weight.contiguous()
    B, T, _ = x.shape
    parts = [x.new_empty(B, T, width) for width in widths]
    flags, strip = _flags(FORWARD, widths, weight.shape[1]), _no_longer(FORWARD.strip, T)
    strips = B * -(-T // strip)
    rows = min(FORWARD.rows, triton.next_power_of_2(strips))
    programs = -(-strips // rows)
    tensors, options = _operands(x, weight, bias, state, starts, scale)
    convolution_kernel[(programs * flags["BLOCKS"],)](
        *tensors, *_three(parts), T, strips, STRIP=strip, ROWS=rows, **options, **flags
    )
    first, second, third = (*parts, *(x.new_empty(0) for _ in range(PARTS - len(parts))))
    return first, second, third


convolution = torch.library.custom_op("efla_kernels::convolution", _forward, mutates_args=())


@convolution.register_fake
def _(x, weight, bias, state, starts, scale, widths):
    parts = [x.new_empty(x.shape[0], x.shape[1], width) for width in widths]
    return (*parts, *(x.new_empty(0) for _ in range(PARTS - len(parts))))


def _backward(
    dy: list[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    scale: Tensor | None,
    widths: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dweight fp32 [D, W], dbias fp32 [D], dstate; the last two empty where there is none)."""
    x, weight = rows_in_place(x), weight.contiguous()
    (B, T, D), W = x.shape, weight.shape[1]
    dx = x.new_empty(B, T, D)
    d_state = x.new_empty(0) if state is None else torch.zeros_like(state, memory_format=torch.contiguous_format)
    flags = _flags(BACKWARD, widths, W)
    strip = strip_of(BACKWARD, B, T, flags["BLOCKS"])
    strips = B * -(-T // strip)
    table = x.new_empty(strips, D, W, dtype=torch.float32)
    bias_table = x.new_empty((strips, D) if bias is not None else 0, dtype=torch.float32)
    tensors, options = _operands(x, weight, bias, state, starts, scale)
    convolution_gradient_kernel[(strips * flags["BLOCKS"],)](
        *tensors, *_three([part.contiguous() for part in dy]), dx, d_state, table, bias_table, T,
        STRIP=strip, STAGES=BACKWARD.stages, WHOLE=T % strip == 0, **options, **flags,
    )  # fmt: skip
    return dx, table.sum(0), bias_table.sum(0) if bias is not None else bias_table, d_state


convolution_backward = torch.library.custom_op("efla_kernels::convolution_backward", _backward, mutates_args=())


@convolution_backward.register_fake
def _(dy, x, weight, bias, state, starts, scale, widths):
    fp32 = {"dtype": torch.float32}
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape, **fp32),
        weight.new_empty(weight.shape[0] if bias is not None else 0, **fp32),
        x.new_empty(0) if state is None else state.new_empty(state.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, widths = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.widths = widths


def _gradient(ctx: Any, *dy: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, state, starts, scale = ctx.saved_tensors
    given = [x.new_zeros(*x.shape[:2], width) if part is None else part for part, width in zip(dy, ctx.widths)]
    backward = convolution_backward if traced() else _backward
    dx, d_weight, d_bias, d_state = backward(given, x, weight, bias, state, starts, scale, ctx.widths)
    return (
        dx,
        d_weight.to(weight.dtype),
        None if bias is None else d_bias.to(bias.dtype),
        None if state is None else d_state,
        None,
        None,  # of the factors: they count as constants
        None,
    )


_whole = differentiable(convolution, _forward, _setup, _gradient)


class _LastApart(torch.autograd.Function):
    """The last part by an op of its own, so that a graph may compute the others again without it; one gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        starts: Tensor | None,
        scale: Tensor | None,
        widths: list[int],
    ) -> tuple[Tensor, ...]:
        _setup(ctx, (x, weight, bias, state, starts, scale, widths), ())
        cut = sum(widths[:-1])
        parts: list[Tensor] = []
        for channels, cut_widths in ((slice(0, cut), widths[:-1]), (slice(cut, None), widths[-1:])):
            some = convolution(
                x[..., channels], weight[channels], None if bias is None else bias[channels],
                None if state is None else state[..., channels], starts, scale, cut_widths,
            )  # fmt: skip
            parts += some[: len(cut_widths)]
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradient(ctx, *dy)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    scale: Tensor | None,
    widths: list[int],
    last_apart: bool,
) -> tuple[Tensor, ...]:
    """The parts y; last_apart: see `short_convolution`."""
    arguments = (x, weight, bias, state, starts, scale, widths)
    if last_apart and len(widths) > 1 and traced() and wants_gradient(arguments):
        return _LastApart.apply(*arguments)
    return _whole(*arguments)[: len(widths)]
