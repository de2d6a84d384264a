"""Convolution group, norms, SwiGLU and loss on a GPU: against float64, in every type, compiled, the same bits twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from efla_kernels import linear, linear_cross_entropy, norm_linear, short_convolution, swiglu_linear, unit_rms_norm
from efla_kernels.layers.cross_entropy import logit_rows
from efla_kernels.selftest.accuracy_layers import ConvolutionCase, LossCase
from efla_kernels.selftest.rows import Row
from efla_kernels.selftest.rows_layers import WIDE, layer_rows
from efla_kernels.selftest.run import run_row
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """torch.compile gives up on a function after eight forms, which the cases of one test together exceed."""
    torch._dynamo.reset()


@pytest.mark.parametrize("row", layer_rows(), ids=lambda row: row.name)
def test_the_self_tests_rows(row: Row) -> None:
    """Outputs and all gradients against float64, in memory filled with NaN."""
    result = run_row(row, "cuda")
    assert not result["failed"], result


@pytest.mark.parametrize("name", WIDE)
def test_convolution_gives_the_same_bits_in_every_run(name: str) -> None:
    case = WIDE[name]
    tensors = case.inputs(0, "cuda")
    first, again = (case.run(tensors, "auto") for _ in range(2))
    assert all(torch.equal(again[n], x) for n, x in first.items())


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
    """But for the two forms of the gradient, that of full strips and that of others."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **what: compiled.append(str(what.get("src"))))
    counts = []
    for i in range(12):
        case = ConvolutionCase(BF16, batch=1 + i % 3, tokens=320 + 37 * i, widths=(64, 64))
        case.run(case.inputs(0, "cuda"), "auto")
        counts.append(len(compiled))
    assert counts[-1] == counts[3], f"kernels compiled after each length: {counts}"


def test_loss_holds_one_block_of_logits() -> None:
    """Peak memory: a block of fp32 logits, the head's fp32 sums, the hidden states' gradient, and nothing like them."""
    tensors = LossCase(BF16, tokens=8192, key_width=512).inputs(0, "cuda")
    h, weight, targets = (x.requires_grad_(x.is_floating_point()) for x in tensors.values())
    torch.autograd.grad(linear_cross_entropy(h, weight, targets), (h, weight))  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_cross_entropy(h, weight, targets)
    workspace = 2**25  # of cuBLASLt on Hopper, taken from the allocator by every product
    expected = 4 * logit_rows(8192, 32000) * 32000 + 4 * 32000 * 512 + 2 * 8192 * 512 + workspace
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * expected


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [2816, 1000, 3])
def test_swiglu_against_float64(width: int, scaled: bool, dtype: torch.dtype) -> None:
    """Plain and compiled; in 16 bits the product of gate and up, its gradient and the results are rounded."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((3, 70, 2 * width), (64, width), (3, 70, 64))
    gate_up, weight, dy = (torch.randn(s, generator=generator, device="cuda").to(dtype) for s in shapes)
    row_scale = torch.rand(3, 70, generator=generator, device="cuda") + 0.1 if scaled else None
    leaves = [x.double().requires_grad_() for x in (gate_up, weight)]
    truth = swiglu_linear(*leaves, row_scale=row_scale, backend="torch")
    expected = (truth, *torch.autograd.grad(truth, leaves, dy.double()))
    for form in (swiglu_linear, torch.compile(swiglu_linear, fullgraph=True)):
        leaves = [x.clone().requires_grad_() for x in (gate_up, weight)]
        y = form(*leaves, row_scale=row_scale)
        for got, x in zip((y, *torch.autograd.grad(y, leaves, dy)), expected, strict=True):
            assert got.dtype == dtype and got.shape == x.shape
            assert (got.double() - x).norm() <= (2e-6 if dtype == torch.float32 else 5e-3) * x.norm()


def test_swiglu_keeps_its_inputs_alone() -> None:
    """Between the passes nothing of the activation's size lives but the result."""
    gate_up = torch.randn(4096, 2 * 2816, device="cuda", dtype=BF16).requires_grad_()
    weight = torch.randn(64, 2816, device="cuda", dtype=BF16).requires_grad_()
    swiglu_linear(gate_up, weight).sum().backward()  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    y = swiglu_linear(gate_up, weight)
    assert torch.cuda.memory_allocated() - before <= 1.01 * y.numel() * 2


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "width", "outputs", "gates"),
    [((3, 335), 1024, (384, 128), 8), ((777,), 2048, (256,), 16), ((515,), 1000, (72,), 0), ((300,), 1536, (72,), 33)],
)
def test_norm_linear_against_float64(
    rows: tuple[int, ...], width: int, outputs: tuple[int, ...], gates: int, dtype: torch.dtype
) -> None:
    """Plain and compiled, products times the norm's factors, and two sums of the stream; in 16 bits each product and
    gradient is rounded."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)

    inputs = {"h": normal(*rows, width), "y": normal(*rows, 72), "gate_up": normal(*rows, 144)}
    inputs["h"].view(-1, width)[::3] *= 1e-2
    inputs |= {f"weight{i}": normal(O, width, scale=width**-0.5) for i, O in enumerate(outputs)}
    inputs |= {"back": normal(width, 72, scale=72**-0.5), "down": normal(width, 72, scale=72**-0.5)}
    inputs["narrow"] = normal(gates, width, scale=width**-0.5) if gates else None
    slopes = [normal(*rows, O) for O in (width, width, *outputs, *([gates] if gates else []))]

    def plain(leaves: dict[str, Tensor], weights: list[Tensor], narrow: Tensor | None) -> list[Tensor]:
        h, normed = leaves["h"], F.rms_norm(leaves["h"], (width,), eps=1e-6)
        sums = [h + leaves["y"] @ leaves["back"].t(), h + swiglu_linear(leaves["gate_up"], leaves["down"])]
        return [*sums, *(normed @ w.t() for w in weights), *([] if narrow is None else [normed @ narrow.t()])]

    def fused(leaves: dict[str, Tensor], weights: list[Tensor], narrow: Tensor | None) -> list[Tensor]:
        stream, raws, r, logits = norm_linear(leaves["h"], weights, narrow, eps=1e-6)
        sums = [linear(leaves["y"], leaves["back"], residual=stream)]
        sums.append(swiglu_linear(leaves["gate_up"], leaves["down"], residual=stream))
        return [*sums, *((raw * r[..., None]).to(dtype) for raw in raws), *([] if logits is None else [logits])]

    results = []
    for form in (plain, fused, torch.compile(fused, fullgraph=True)):
        wide = torch.float64 if form is plain else dtype
        leaves = {n: None if t is None else t.to(wide, copy=True).requires_grad_() for n, t in inputs.items()}
        weights = [t for n, t in leaves.items() if n.startswith("weight") and t is not None]
        results.append(form(leaves, weights, leaves["narrow"]))
        there = [t for t in leaves.values() if t is not None]
        results[-1] += torch.autograd.grad(results[-1], there, [t.to(wide) for t in slopes])
    for got in results[1:]:
        for ours, x in zip(got, results[0], strict=True):
            assert ours.dtype == dtype and ours.shape == x.shape
            assert (ours.double() - x).norm() <= (3e-6 if dtype == torch.float32 else 5e-3) * x.norm()


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 1333, 128), (1001, 96), (7, 4096)])
def test_unit_norm_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(2))
    leaf = x.double().requires_grad_()
    truth = F.rms_norm(leaf, shape[-1:], eps=1e-6)
    expected = (truth, *torch.autograd.grad(truth, leaf, dy.double()))
    for form in (unit_rms_norm, torch.compile(unit_rms_norm, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        y = form(leaf, eps=1e-6)
        for got, t in zip((y, *torch.autograd.grad(y, leaf, dy)), expected, strict=True):
            assert (
                got.dtype == dtype
                and (got.double() - t).norm() <= (1e-6 if dtype == torch.float32 else 5e-3) * t.norm()
            )


def test_norm_linear_keeps_its_input_and_factors() -> None:
    """Between the passes: a factor for each row, and the results."""
    x = torch.randn(4096, 1024, device="cuda", dtype=BF16).requires_grad_()
    weight = torch.randn(64, 1024, device="cuda", dtype=BF16).requires_grad_()
    norm_linear(x, [weight], eps=1e-6)[1][0].sum().backward()  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated()
    _, raws, r, _ = norm_linear(x, [weight], eps=1e-6)
    assert torch.cuda.memory_allocated() - before <= 1.01 * (raws[0].nbytes + r.nbytes)
