"""The convolution group and the fused loss on a GPU: against float64, in every type, compiled, and the same twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from efla_kernels import linear_cross_entropy, short_convolution
from efla_kernels.selftest import poisoned_memory
from efla_kernels.triton import cross_entropy
from torch import Tensor, nn

from tests.kernels.convolution_cases import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# rounding of results to 8 or 11 bits, and fp32 sums
BOUND = {BF16: 4e-3, FP16: 1e-3, FP32: 2e-6}
WIDE = {
    "340M": Case(batch=8, tokens=2048, widths=(1024, 1024, 1024)),
    "Mamba-2 340M, odd length": Case(batch=3, tokens=1001, widths=(2048, 128, 128), bias=True),
    "packed": Case(batch=1, tokens=2100, widths=(256, 256, 256), cu_seqlens=(0, 1, 3, 700, 700, 1999, 2100)),
}


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", CASES)
def test_convolution_against_float64(name: str, dtype: torch.dtype) -> None:
    with poisoned_memory():
        errors = replace(CASES[name], dtype=dtype).errors("auto", "cuda")
    assert all(error <= BOUND[dtype] for error in errors.values()), errors


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", WIDE)
def test_convolution_at_models_widths(name: str, dtype: torch.dtype) -> None:
    """Against PyTorch's own operations in float64 (the token loop of `Case.truth` would take long here)."""
    case = replace(WIDE[name], dtype=dtype)
    tensors, dy = case.inputs("cuda")
    with poisoned_memory():
        got = case.run(tensors, dy, "auto")
    expected = case.run({n: x.double() for n, x in tensors.items()}, dy.double(), "torch")
    bound = 2e-5 if dtype == FP32 else BOUND[dtype]  # sums of 16,384 products in fp32
    assert all((got[n].double() - x).norm() <= bound * x.norm() for n, x in expected.items())
    again = case.run(tensors, dy, "auto")
    assert all(torch.equal(again[n], x) for n, x in got.items()), "the same bits in every run"


class Mixer(nn.Module):
    """A projection and the convolution group behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 3 * 64)
        self.weight = nn.Parameter(torch.randn(3 * 64, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = short_convolution(self.inner(x), self.weight, widths=(64, 64, 64))
        return q * k + v


def test_convolution_compiled_whole_with_changing_lengths() -> None:
    torch.manual_seed(0)
    module = Mixer().cuda().to(BF16)
    compiled = torch.compile(module, fullgraph=True)
    for tokens in (128, 200, 333):
        x = torch.randn(2, tokens, 64, device="cuda", dtype=BF16)
        results = []
        for form in (module, compiled):
            leaf = x.clone().requires_grad_()
            y = form(leaf)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), (leaf, *module.parameters()))))
        for got, expected in zip(results[1], results[0], strict=True):
            assert (got.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()


def test_convolution_lengths_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **what: compiled.append(str(what.get("src"))))
    counts = []
    for i in range(12):
        case = Case(batch=1 + i % 3, tokens=300 + 37 * i, widths=(64, 64), dtype=BF16)
        case.run(*case.inputs("cuda"), "auto")
        counts.append(len(compiled))
    assert counts[-1] == counts[3], f"kernels compiled after each length: {counts}"


def loss_inputs(tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator, device="cuda").to(dtype)
    weight = (torch.randn(vocabulary, hidden, generator=generator, device="cuda") / hidden**0.5).to(dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device="cuda")
    targets[::9] = -100
    return h.requires_grad_(), weight.requires_grad_(), targets


def loss_truth(h: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = [x.detach().double().requires_grad_() for x in (h, weight)]
    logits = wide[0] @ wide[1].t()
    loss = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return (loss, *torch.autograd.grad(loss, wide))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(5000, 32000), (17, 1001), (2048, 8192)])
def test_loss_within_1e_5_and_gradients_within_rounding(tokens: int, vocabulary: int, dtype: torch.dtype) -> None:
    h, weight, targets = loss_inputs(tokens, 256, vocabulary, dtype)
    with poisoned_memory():
        loss = linear_cross_entropy(h, weight, targets)
        got = torch.autograd.grad(loss, (h, weight))
    expected, *gradients = loss_truth(h, weight, targets)
    assert abs(loss.item() / expected.item() - 1) <= 1e-5
    bound = 1e-5 if dtype == FP32 else BOUND[dtype]
    assert all((x.double() - y).norm() <= bound * y.norm() for x, y in zip(got, gradients, strict=True))


def test_loss_holds_one_block_of_logits() -> None:
    """Peak memory: a block of fp32 logits, the head's fp32 sums, the hidden states' gradient, and nothing like them."""
    h, weight, targets = loss_inputs(8192, 512, 32000, BF16)
    torch.autograd.grad(linear_cross_entropy(h, weight, targets), (h, weight))  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(h, weight, targets)
    expected = 4 * cross_entropy.ROWS * 32000 + 4 * 32000 * 512 + 2 * 8192 * 512
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * expected
