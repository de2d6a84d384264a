"""The stream between a norm and the maps that add to it: its gradients meet in the norm's backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from efla_kernels import Stream, linear, norm_linear, swiglu_linear
from torch import Tensor

from tests.kernels.interpreter import expect_passes

EPS = 1e-3


def leaves(dtype: torch.dtype, rows: tuple[int, ...] = (2, 9)) -> dict[str, Tensor]:
    """h and the weights of two blocks' halves: 16 wide, 6 behind the first, 2 x 5 behind the second."""
    generator = torch.Generator().manual_seed(0)
    sizes = {"h": (*rows, 16), "first": (6, 16), "back": (16, 6), "gate_up": (10, 16), "down": (16, 5)}
    return {name: torch.randn(size, generator=generator).to(dtype).requires_grad_() for name, size in sizes.items()}


def fused(x: dict[str, Tensor], backend: str) -> Tensor:
    stream, (raw,), r, _ = norm_linear(x["h"], [x["first"]], eps=EPS, backend=backend)
    h = linear((raw * r[..., None]).to(raw.dtype).tanh(), x["back"], residual=stream, backend=backend)
    stream, (raw,), r, _ = norm_linear(h, [x["gate_up"]], eps=EPS, backend=backend)
    return swiglu_linear(raw, x["down"], row_scale=r, residual=stream, backend=backend)


def plain(x: dict[str, Tensor]) -> Tensor:
    h = x["h"] + (F.rms_norm(x["h"], (16,), eps=EPS) @ x["first"].t()).tanh() @ x["back"].t()
    gate, up = (F.rms_norm(h, (16,), eps=EPS) @ x["gate_up"].t()).chunk(2, -1)
    return h + (F.silu(gate) * up) @ x["down"].t()


@pytest.mark.parametrize("rows", [(2, 9), (1,), (3, 0)])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_two_blocks_against_float64(dtype: torch.dtype, bound: float, compiled: bool, rows: tuple[int, ...]) -> None:
    run(dtype, bound, "torch", compiled, rows)


def run(dtype: torch.dtype, bound: float, backend: str, compiled: bool, rows: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    ours = leaves(dtype, rows)
    wide = {name: x.detach().double().requires_grad_() for name, x in ours.items()}
    y, expected = (torch.compile(fused, fullgraph=True) if compiled else fused)(ours, backend), plain(wide)
    assert not y._is_view()  # FSDP warns of views among a block's results
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = [y, *torch.autograd.grad(y, list(ours.values()), dy)]
    truth = [expected, *torch.autograd.grad(expected, list(wide.values()), dy.double())]
    for got, x in zip(found, truth, strict=True):
        assert got.dtype == dtype and got.shape == x.shape and (got - x).norm() <= bound * x.norm()


def test_a_map_of_another_kind_adds_to_it_too() -> None:
    """`add` has the gradients of a sum, together with the norm's."""
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    weight, update = torch.randn(4, 16, dtype=torch.float64), torch.randn(3, 16, dtype=torch.float64)
    stream, (raw,), r, _ = norm_linear(x, [weight], eps=EPS)
    assert torch.equal(stream.add(update), x + update)
    got = torch.autograd.grad((stream.add(update).sin().sum() + (raw * r[:, None]).sum()), x)
    expected = torch.autograd.grad((x + update).sin().sum() + (F.rms_norm(x, (16,), eps=EPS) @ weight.t()).sum(), x)
    torch.testing.assert_close(got, expected)


def test_a_tensor_is_added_to_as_a_stream_is() -> None:
    """Where h is not behind a norm of ours: the same sums, and the gradients of sums."""
    x = leaves(torch.float64)
    back, y = x["back"], torch.randn(2, 9, 10, dtype=torch.float64)
    r = torch.rand(2, 9, dtype=torch.float64)
    stream = norm_linear(x["h"], [x["first"]], eps=EPS)[0]
    for call in (
        lambda h: linear(y[..., :6], back, residual=h), lambda h: swiglu_linear(y, x["down"], row_scale=r, residual=h)
    ):  # fmt: skip
        got = call(x["h"])
        torch.testing.assert_close(got, call(stream))
        assert torch.equal(torch.autograd.grad(got, x["h"], torch.ones_like(got))[0], torch.ones_like(got))


def test_the_link_takes_no_memory() -> None:
    stream = norm_linear(torch.randn(50, 64), [torch.randn(3, 64)], eps=EPS)[0]
    assert stream.link.untyped_storage().nbytes() == 4 and not stream.link.any()


def test_what_does_not_fit_is_named() -> None:
    stream = Stream(torch.zeros(2, 4), torch.zeros(2, 4))
    with pytest.raises(
        ValueError, match=r"residual: expected a stream torch.float32 \[2, 3\], as the result, got .* \[2, 4\]"
    ):
        linear(torch.zeros(2, 5), torch.zeros(3, 5), residual=stream)
    with pytest.raises(
        ValueError, match=r"residual: expected a stream torch.float64 \[2, 4\], as the result, got torch.float32"
    ):
        swiglu_linear(torch.zeros(2, 6).double(), torch.zeros(4, 3).double(), residual=stream)


@pytest.mark.timeout(300)
def test_kernels_in_the_interpreter() -> None:
    expect_passes("interpreted_stream")
