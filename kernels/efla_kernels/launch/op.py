"""Ops that torch.library knows, called past it where nobody watches: its autograd in Python costs 0.2 ms a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


def traced() -> bool:
    """Whether somebody wants to see the op itself: torch.compile, or a mode that watches ops (checkpointing does)."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def wants_gradient(inputs: Iterable[Any]) -> bool:
    """Whether a gradient to one of the inputs may be asked for."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


def differentiable(
    op: Any,
    forward: Callable[..., Any],
    setup: Callable[..., None],
    gradient: Callable[..., Any],
    results: int | None = None,
) -> Callable[..., Any]:
    """Give `op`, a torch.library op over `forward`, its autograd, and return what to call in its place.

    setup(ctx, inputs, output) and gradient(ctx, *gradients) are those of `torch.library.register_autograd`; arguments
    go by position. results: how many of the outputs, the first ones, anybody but `setup` sees; autograd takes no note
    of the rest, and `gradient` may get no gradients of them. Second derivatives raise RuntimeError.
    """
    op.register_autograd(gradient, setup_context=setup)

    once = torch.autograd.function.once_differentiable(gradient)

    def shown(output: Any) -> Any:
        return output if results is None else output[:results]

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            setup(ctx, inputs, output)
            return shown(output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            # with create_graph=True it has something to do, else only a price
            return once(ctx, *gradients) if torch.is_grad_enabled() else gradient(ctx, *gradients)

    def call(*inputs: Any) -> Any:
        if traced():
            return shown(op(*inputs))
        if wants_gradient(inputs):
            return Eager.apply(*inputs)
        return shown(forward(*inputs))

    return call
