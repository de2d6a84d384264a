"""Registers our ops with torch.library, and calls them directly where that is possible.

torch.library gives an op fake tensors, torch.compile and autograd. Its Python autograd adds 0.2 ms per call, so we call
our functions directly unless torch.compile or a dispatch mode (activation checkpointing has one) is active.

How to register an op: declare its arguments as NamedTuples, whose fields become the schema (Tensor, Tensor | None, int,
float, bool, list[int], or another such NamedTuple), and write four functions of them:

    class Inputs(NamedTuple):
        x: Tensor
        bias: Tensor | None
        eps: float

    class Outputs(NamedTuple):          # tensors; the first `results` fields reach the caller
        y: Tensor
        r: Tensor

    class Kept(NamedTuple):             # what the backward pass reads, tensors before options
        r: Tensor
        inputs: Inputs

    class OutputGradients(NamedTuple):  # named as outputs
        y: Tensor                       # zeros where the loss does not use y; None there if declared Tensor | None

    class Gradients(NamedTuple):        # named as inputs; inputs that are not named get no gradient
        x: Tensor
        bias: Tensor                    # anything where bias is None, e.g. an empty tensor

    def forward(i: Inputs) -> Outputs
    def fake(i: Inputs) -> Outputs                              # allocates what forward returns
    def keep(i: Inputs, o: Outputs) -> Kept                     # called where a gradient is needed
    def backward(d: OutputGradients, kept: Kept) -> Gradients
    def backward_fake(d: OutputGradients, kept: Kept) -> Gradients

    norm = register("norm", forward, fake, Autograd(keep, backward, backward_fake), results=1)
    y = norm(Inputs(x, None, 1e-6))

An op with one output may return a Tensor, whose gradient is then the only field of OutputGradients. Where forward
allocates its outputs by calling fake, the two cannot disagree. Outputs must not be views of inputs. Every gradient that
reaches `backward` is contiguous: autograd hands over transposed, strided and expanded ones (`y.sum()` gives a single
number with strides of 0), which kernels would read wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode


def traced() -> bool:
    """Whether the op itself must be visible: under torch.compile, or a dispatch mode such as checkpointing's."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def wants_gradient(inputs: Iterable[Any]) -> bool:
    """Whether autograd may ask for the gradient of one of the inputs."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)


class Autograd(NamedTuple):
    """How an op is differentiated; see the module.

    residual: an input that the op adds to its first result and uses for nothing else: its gradient is that result's.
    """

    keep: Callable[..., Any]
    backward: Callable[..., Any]
    backward_fake: Callable[..., Any]
    residual: str | None = None


def register(
    name: str, forward: Callable[..., Any], fake: Callable[..., Any], autograd: Autograd | None = None, *,
    results: int | None = None, mutates: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Register the op efla_kernels::`name` and return the function of the op's Inputs that callers use.

    It returns all outputs, or the first `results` of them, or one tensor where that is all. mutates: the inputs that
    the op writes to. Its attributes are `op` and `backward_op` (torch.library's) and `setup` and `gradient` (the halves
    of the autograd formula). Second derivatives raise RuntimeError.
    """
    inputs, outputs = _types(forward)
    nested = inputs.nested

    def shown(output: Any) -> Any:
        if isinstance(output, Tensor):
            return output
        return output[0] if results == 1 else tuple(output[:results])

    op = _custom_op(name, lambda *flat: outputs.flatten(forward(inputs.build(flat))), [("", inputs)], outputs, mutates)
    op.register_fake(lambda *flat: outputs.flatten(fake(inputs.build(flat))))
    if autograd is None:

        def call(given: Any) -> Any:
            return shown(op(*inputs.flatten(given)) if traced() else forward(given))

        vars(call).update(op=op)
        return call

    save, setup, gradient, backward_op = _formula(name, inputs, outputs, autograd)
    op.register_autograd(gradient, setup_context=setup)
    once = torch.autograd.function.once_differentiable(gradient)

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *flat: Any) -> Any:
            given = inputs.build(flat)
            output = forward(given)
            save(ctx, given, output)
            return shown(output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor | None) -> Any:
            # the guard against second derivatives costs time, and only create_graph=True needs it
            return once(ctx, *gradients) if torch.is_grad_enabled() else gradient(ctx, *gradients)

    def call_differentiable(given: Any) -> Any:
        flat = inputs.flatten(given) if nested else given
        if traced():
            return shown(op(*flat))
        if wants_gradient(flat):
            return Direct.apply(*flat)
        return shown(forward(given))

    vars(call_differentiable).update(op=op, backward_op=backward_op, setup=setup, gradient=gradient)
    return call_differentiable


def _formula(name: str, inputs: _Fields, outputs: _Fields, autograd: Autograd) -> tuple[Any, Any, Any, Any]:
    """(save, setup, gradient, the op `name`_backward).

    setup and gradient are what torch.library.register_autograd takes; save(ctx, inputs, outputs) is setup on
    NamedTuples. Autograd casts a gradient to its input's dtype.
    """
    given, kept, result = _types(autograd.backward)
    count = len(given.hints)
    sources = [0] if outputs.single else [list(outputs.hints).index(field) for field in given.hints]
    required = [(i, source) for i, source in enumerate(sources) if list(given.hints.values())[i] is Tensor]
    is_tensor = [hint in (Tensor, Tensor | None) for hint in kept.hints.values()]
    tensors = sum(is_tensor)
    if not all(is_tensor[:tensors]):
        raise TypeError(f"{name}: expected what is kept to name tensors before options, got {list(kept.hints)}")
    result_fields = list(result.hints)
    of_input = [result_fields.index(field) if field in result_fields else None for field in inputs.hints]
    residual = None if autograd.residual is None else list(inputs.hints).index(autograd.residual)

    def backward(*flat: Any) -> Any:
        gradients = [None if g is None else g.contiguous() for g in flat[:count]]
        return result.flatten(autograd.backward(given.build(gradients), kept.build(flat[count:])))

    def backward_fake(*flat: Any) -> Any:
        return result.flatten(autograd.backward_fake(given.build(flat[:count]), kept.build(flat[count:])))

    op = _custom_op(f"{name}_backward", backward, [("d_", given), ("", kept)], result, ())
    op.register_fake(backward_fake)

    def save(ctx: Any, inputs_given: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        flat = kept.flatten(autograd.keep(inputs_given, output))
        ctx.save_for_backward(*flat[:tensors])
        ctx.options = flat[tensors:]
        every = [output] if outputs.single else output
        ctx.required = [(i, every[source].shape, every[source].dtype) for i, source in required]

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        save(ctx, of_op(inputs), output if outputs.single else outputs.build(output))

    of_op = inputs.build

    def gradient(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        arriving = [gradients[source] for source in sources]
        saved = ctx.saved_tensors
        for i, shape, dtype in ctx.required:
            if arriving[i] is None:
                arriving[i] = next(x for x in saved if x is not None).new_zeros(shape, dtype=dtype)
        found = (op if traced() else backward)(*arriving, *saved, *ctx.options)
        found = [found] if isinstance(found, Tensor) else found
        own = [
            found[i] if i is not None and needed else None
            for i, needed in zip(of_input, ctx.needs_input_grad, strict=True)
        ]
        if residual is not None and ctx.needs_input_grad[residual]:
            own[residual] = gradients[0]
        return tuple(own)

    return save, setup, gradient, op


class _Fields:
    """The fields of a NamedTuple type, those of nested ones in their place; or a single Tensor."""

    def __init__(self, kind: Any) -> None:
        self.kind, self.single = kind, kind is Tensor
        own = {} if self.single else get_type_hints(kind)
        self.parts = [_Fields(hint) if hasattr(hint, "_fields") else None for hint in own.values()]
        self.nested = any(self.parts)
        self.hints: dict[str, Any] = {}  # by the names of the flat fields
        for (field, hint), part in zip(own.items(), self.parts, strict=True):
            self.hints.update({field: hint} if part is None else part.hints)

    def flatten(self, value: Any) -> Any:
        """The flat fields of a NamedTuple as a tuple; a tensor as it is."""
        if self.single:
            return value
        return tuple(value) if not self.nested else tuple(self._walk(value))

    def _walk(self, value: Any) -> Iterator[Any]:
        for field, part in zip(value, self.parts, strict=True):
            if part is None:
                yield field
            else:
                yield from part._walk(field)

    def build(self, flat: Iterable[Any]) -> Any:
        """The NamedTuple of these flat fields."""
        return self._take(iter(flat)) if self.nested else self.kind(*flat)

    def _take(self, flat: Iterator[Any]) -> Any:
        return self.kind(*[next(flat) if part is None else part._take(flat) for part in self.parts])


def _types(function: Callable[..., Any]) -> list[_Fields]:
    """The types of a function's arguments and, last, of its result."""
    return [_Fields(hint) for hint in get_type_hints(function).values()]


def _custom_op(
    name: str,
    function: Callable[..., Any],
    arguments: list[tuple[str, _Fields]],
    result: _Fields,
    mutates: tuple[str, ...],
) -> Any:
    """A torch.library op whose parameters are the flat fields, with a prefix, and whose results are tensors."""
    parameters = [
        inspect.Parameter(prefix + field, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=hint)
        for prefix, fields in arguments
        for field, hint in fields.hints.items()
    ]
    returned: Any = Tensor if result.single else tuple[(Tensor,) * len(result.hints)]  # type: ignore[misc]

    def prototype() -> None: ...

    vars(prototype).update(__signature__=inspect.Signature(parameters, return_annotation=returned))
    schema = torch.library.infer_schema(prototype, mutates_args=mutates)
    return torch.library.custom_op(f"efla_kernels::{name}", function, mutates_args=mutates, schema=schema)
