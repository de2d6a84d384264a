"""Gradients in every layout that autograd hands to the kernels, for every op, in Triton's interpreter.

Run by test_layouts.py under TRITON_INTERPRET=1. The delta rules and state-space duality are held to their float64
definition; the layers to the same gradients in a contiguous copy, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import efla_kernels
import pytest
import torch
from efla_kernels.layers.cross_entropy_kernels import fused_linear_cross_entropy
from efla_kernels.selftest.accuracy import LAYOUTS, OPS, Case, relative_errors
from efla_kernels.selftest.accuracy_ssd import SsdCase
from efla_kernels.selftest.run import poisoned_memory
from torch import Tensor

FP32 = torch.float32
ODD = [name for name in LAYOUTS if name != "contiguous"]
TRITON = {"backend": "triton"}


@pytest.mark.parametrize("layout", ODD)
@pytest.mark.parametrize("op", [*OPS, "ssd", "mamba2"])
@pytest.mark.parametrize("backend", ["triton", "triton_recompute"])
def test_rules_against_float64(op: str, layout: str, backend: str) -> None:
    kind = Case if op in OPS else SsdCase
    case = kind(op, FP32, batch=2, tokens=70, heads=2, key_width=16, value_width=32, layout=layout)
    tensors = case.inputs(0, "cpu")
    with poisoned_memory():
        got = case.run(tensors, backend)
    errors = relative_errors(got, case.truth(tensors))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("op", ["efla", "gated_efla"])
@pytest.mark.parametrize("layout", ODD)
def test_rules_of_split_sequences(monkeypatch: pytest.MonkeyPatch, op: str, layout: str) -> None:
    """The final state's gradient goes through the merge of the segments there."""
    from efla_kernels.delta_rule import triton_op

    monkeypatch.setattr(triton_op, "split_segments", lambda *_, **__: 3)
    case = Case(op, FP32, tokens=300, heads=1, key_width=16, value_width=16, layout=layout)
    tensors = case.inputs(0, "cpu")
    with poisoned_memory():
        got = case.run(tensors, "triton")
    errors = relative_errors(got, case.truth(tensors))
    assert max(errors.values()) <= 1e-5, errors


def convolution(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Sequence[Tensor]:
    return efla_kernels.short_convolution(x, weight, bias, widths=(12, 4), state=state, **TRITON)


def norm_linear(h: Tensor, first: Tensor, second: Tensor, narrow: Tensor) -> Sequence[Tensor]:
    stream, raws, _, logits = efla_kernels.norm_linear(h, (first, second), narrow, eps=1e-3, **TRITON)
    return (*raws, logits, stream.add(torch.zeros_like(h)))


def unit_norm(x: Tensor) -> Sequence[Tensor]:
    return (efla_kernels.unit_rms_norm(x, eps=1e-3, **TRITON),)


def swiglu(gate_up: Tensor, weight: Tensor, h: Tensor, norm: Tensor) -> Sequence[Tensor]:
    """Onto a stream, whose gradient joins the norm's."""
    stream, raws, _, _ = efla_kernels.norm_linear(h, (norm,), eps=1e-3, **TRITON)
    return (efla_kernels.swiglu_linear(gate_up, weight, residual=stream, **TRITON), *raws)


def linear(x: Tensor, weight: Tensor, h: Tensor, norm: Tensor) -> Sequence[Tensor]:
    stream, raws, _, _ = efla_kernels.norm_linear(h, (norm,), eps=1e-3, **TRITON)
    return (efla_kernels.linear(x, weight, residual=stream, **TRITON), *raws)


def last_token(q: Tensor, k: Tensor, beta_logit: Tensor, log_g: Tensor) -> Sequence[Tensor]:
    return (efla_kernels.last_weights("gated_efla", q, k, beta_logit, log_g, **TRITON),)


def cross_entropy(hidden: Tensor, weight: Tensor) -> Sequence[Tensor]:
    """A scalar, whose gradient may be one number of a larger tensor."""
    targets = torch.arange(hidden.shape[0]) % weight.shape[0]
    return (fused_linear_cross_entropy(hidden, weight, targets, rows=4).expand(3),)


LAYERS: dict[Callable[..., Sequence[Tensor]], list[tuple[int, ...]]] = {
    convolution: [(2, 37, 16), (16, 4), (16,), (2, 3, 16)],
    norm_linear: [(2, 9, 40), (12, 40), (8, 40), (4, 40)],
    unit_norm: [(2, 9, 40)],
    swiglu: [(2, 9, 48), (40, 24), (2, 9, 40), (8, 40)],
    linear: [(2, 9, 24), (40, 24), (2, 9, 40), (8, 40)],
    last_token: [(2, 3, 16), (2, 70, 3, 16), (2, 70, 3), (2, 70, 3)],
    cross_entropy: [(6, 16), (50, 16)],
}


@pytest.mark.parametrize("layout", ODD)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_give_what_a_contiguous_gradient_gives(
    layer: Callable[..., Sequence[Tensor]], layout: str, compiled: bool
) -> None:
    """compiled: through the registered ops, as torch.compile sees them."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in LAYERS[layer]]
    if layer is last_token:
        leaves[3] = (-leaves[3].detach().abs()).requires_grad_()
    function = torch.compile(layer, backend="aot_eager") if compiled else layer
    with poisoned_memory(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = function(*leaves)
        given = [odd(torch.randn(y.shape, generator=generator), layout) for y in outputs]
        assert not all(d.is_contiguous() for d in given) or layer is cross_entropy
        found = torch.autograd.grad(outputs, leaves, given)
        copies = [d.clone(memory_format=torch.contiguous_format) for d in given]
        expected = torch.autograd.grad(function(*leaves), leaves, copies)
    for got, same in zip(found, expected, strict=True):
        assert torch.equal(got, same)


def odd(d: Tensor, layout: str) -> Tensor:
    """`LAYOUTS` needs two dimensions."""
    return LAYOUTS[layout](d) if d.dim() > 1 else d[:1].expand_as(d)


@pytest.mark.parametrize("op", ["efla", "gated_efla"])
def test_a_compiled_loss_of_the_state_alone(op: str) -> None:
    case = Case(op, FP32, tokens=70, heads=2, key_width=16, value_width=16)
    tensors = {n: x.requires_grad_() for n, x in case.inputs(0, "cpu").items() if n not in ("do", "d_final")}

    def loss(backend: str, **inputs: Tensor) -> Tensor:
        return getattr(efla_kernels, op)(**inputs, output_final_state=True, backend=backend)[1].sum()

    compiled = torch.compile(loss, backend="aot_eager")
    results = [
        torch.autograd.grad(f(backend, **tensors), list(tensors.values()), allow_unused=True)
        for f, backend in ((compiled, "triton"), (loss, "triton"), (loss, "torch"))
    ]
    for got, direct, expected, name in zip(*results, tensors, strict=True):
        if name != "q":
            assert torch.equal(got, direct) and (got - expected).norm() <= 1e-5 * expected.norm(), name
