"""The Triton kernels on a GPU; `make selftest` holds every shape and type, this what users of the ops lean on."""

from __future__ import annotations

from dataclasses import replace

import efla_kernels
import pytest
import torch
from efla_kernels.delta_rule import choices, launch
from efla_kernels.delta_rule import triton_op as ops
from efla_kernels.selftest.accuracy import Case, relative_errors
from efla_kernels.selftest.rows import LENGTHS, PACKED, Row
from efla_kernels.selftest.run import poisoned_memory
from torch import Tensor, nn

from scripts.bench.decoding import decode_inputs, truth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, FP32 = torch.bfloat16, torch.float32


def check(case: Case, seed: int = 0, backend: str = "triton") -> None:
    """Output, state and every gradient within the self-test's bounds, 0 <= a lam <= 1 aside from them."""
    tensors = case.inputs(seed, "cuda")
    with poisoned_memory():
        got = case.run(tensors, backend)
    row = Row("", case)
    errors = relative_errors(got, case.truth(tensors))
    bad = {name: error for name, error in errors.items() if not error <= row.bound(name)}
    assert not bad, bad


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0, 100.0])
def test_raw_keys_stay_finite_and_right(scale: float, dtype: torch.dtype) -> None:
    """T = 64, K = 64, keys N(0, 1) times a scale: their norm is 8 times it."""
    check(Case("efla", dtype, tokens=64, key_width=64, value_width=64, key_norm=8 * scale))


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length(tokens: int, initial: bool) -> None:
    check(Case("efla", batch=2, tokens=tokens, key_width=64, value_width=64, initial=initial))


@pytest.mark.parametrize("backend", ["triton", "triton_recompute"])
@pytest.mark.parametrize("op", ["efla", "gated_efla"])
def test_packed_documents_with_empty_ones(op: str, backend: str) -> None:
    case = Case(op, tokens=PACKED[-1], key_width=64, value_width=64, cu_seqlens=PACKED)
    check(case, backend=backend)
    tensors = case.inputs(0, "cuda")
    got = case.run(tensors, backend)
    for n in (0, 3, 5):
        assert torch.equal(got["state"][n], tensors["initial_state"][n])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("op", ["gated_deltanet", "gated_efla"])
def test_gated_gradients(op: str, width: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        check(Case(op, dtype, key_width=width, value_width=width), seed)


def test_packed_lengths_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward over 30 different T: all variants (T divided by 16 or not) come early, none is per T."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **what: compiled.append(str(what.get("src"))))
    counts = []
    for i in range(30):
        tokens = 300 + 37 * i
        case = Case("efla", tokens=tokens, key_width=64, value_width=64, cu_seqlens=(0, 100 + i, tokens), initial=False)
        case.run(case.inputs(i, "cuda"), "triton")
        counts.append(len(compiled))
    assert counts[-1] == counts[4], f"kernels compiled after each length: {counts}"


class Block(nn.Module):
    """A projection, the op and a projection back."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.inner, self.outer = op, nn.Linear(64, 3 * 2 * 64 + 4), nn.Linear(2 * 64, 64)

    def forward(self, x: Tensor) -> Tensor:
        qkv, logits = self.inner(x).split([3 * 2 * 64, 4], -1)
        q, k, v = qkv.unflatten(-1, (3, 2, 64)).unbind(2)
        gates = [logits[..., :2]]
        if self.op.startswith("gated"):
            gates.append(nn.functional.logsigmoid(logits[..., 2:].float()))
        return self.outer(getattr(efla_kernels, self.op)(q, k, v, *gates)[0].flatten(2))


@pytest.mark.parametrize("op", ["efla", "gated_efla"])
def test_compiled_whole_with_changing_lengths(op: str) -> None:
    torch.manual_seed(0)
    block = Block(op).cuda().to(BF16)
    compiled = torch.compile(block, fullgraph=True)
    for tokens in (128, 200, 333):
        x = torch.randn(2, tokens, 64, device="cuda", dtype=BF16)
        results = []
        for module in (block, compiled):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), (leaf, *block.parameters()))))
        for got, expected in zip(results[1], results[0], strict=True):
            assert (got.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()


@pytest.mark.parametrize("op", ["efla", "gated_efla"])
def test_cuda_graph_of_a_training_step(op: str) -> None:
    """Captured once, replayed on new inputs: forward and backward allocate and wait for nothing outside the graph."""
    case = Case(op, tokens=256, key_width=64, value_width=64)
    held, fresh = case.inputs(0, "cuda"), case.inputs(1, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.run(held, "triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run(held, "triton")
    for name, x in fresh.items():
        held[name].copy_(x)
    graph.replay()
    expected = case.run(fresh, "triton")
    for name, x in got.items():
        assert torch.equal(x, expected[name]), name


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the delta rule's kernels that were launched."""
    names: set[str] = set()
    run = launch.launch
    monkeypatch.setattr(launch, "launch", lambda kernel, *a, **b: (names.add(kernel.fn.__name__), run(kernel, *a, **b)))
    return names


ONE = {"deltanet": "gradient_kernel", "efla": "gradient_kernel", "gated_efla": "gradient_gated_kernel"}
FUSED = ONE if choices.has_wide_products() else {}


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("op", ["deltanet", "efla", "gated_deltanet", "gated_efla"])
def test_many_programs_give_the_same_bits_in_every_run(ran: set[str], op: str, heads: int) -> None:
    """Thousands of programs of each kernel: a copy that is not waited for shows there, and not in small rows."""
    case = Case(op, batch=8, tokens=2048, heads=heads, initial=False, final=False)
    tensors = case.inputs(0, "cuda", "cuda")
    first = case.run(tensors, "triton")
    for _ in range(25):
        again = case.run(tensors, "triton")
        assert not [name for name, x in first.items() if not torch.equal(x, again[name])]
    assert FUSED.get(op, "gradient_k_kernel") in ran


@pytest.mark.parametrize("cu_seqlens", [None, PACKED])
@pytest.mark.parametrize("op", FUSED)
def test_both_gradients_in_one_kernel_or_in_two(
    monkeypatch: pytest.MonkeyPatch, ran: set[str], op: str, cu_seqlens: tuple[int, ...] | None
) -> None:
    """Beside the self-test's bounds, which both are held to: the kernels round differently, and no more than that."""
    case = Case(op, tokens=PACKED[-1], cu_seqlens=cu_seqlens, heads=4, strided=True)
    check(case)
    tensors = case.inputs(0, "cuda")
    one = case.run(tensors, "triton")
    assert FUSED[op] in ran and "gradient_k_kernel" not in ran
    choose = choices.choose
    monkeypatch.setattr(choices, "choose", lambda *problem: replace(choose(*problem), gradient=None))
    ops.known_problem.cache_clear()
    two = case.run(tensors, "triton")
    ops.known_problem.cache_clear()
    assert "gradient_k_kernel" in ran
    errors = relative_errors(one, two)
    assert max(errors.values()) <= 1e-2, errors


@pytest.mark.parametrize("op", ONE)
@pytest.mark.parametrize("logit", [-20.0, -60.0, -200.0])
def test_coefficients_that_vanish(op: str, logit: float) -> None:
    """Of every third token the coefficients are 2e-9, 1e-26, 0: finite and right."""
    case = Case(op, tokens=300, key_norm=1.0)
    tensors = case.inputs(0, "cuda")
    tensors["beta_logit"][:, ::3] = logit
    got, row = case.run(tensors, "triton"), Row("", case)
    errors = relative_errors(got, case.truth(tensors))
    assert not [name for name, error in errors.items() if not error <= row.bound(name)], errors
    assert all(bool(x.isfinite().all()) for x in got.values())


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rule", ["deltanet", "efla", "gated_deltanet", "gated_efla"])
def test_decoding_steps_in_a_cuda_graph(rule: str, dtype: torch.dtype) -> None:
    """Three tokens by replay, states moving on in place, against float64."""
    x = decode_inputs(rule, 3, 4, 128, dtype, "cuda")
    wide = {name: t.double() for name, t in x.items()}
    start = {name: x[name].clone() for name in ("conv_state", "state")}
    efla_kernels.decode_step(rule, **x, backend="triton")  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = efla_kernels.decode_step(rule, **x, backend="triton")
    for name, t in start.items():
        x[name].copy_(t)
    for _ in range(3):
        graph.replay()
        expected = efla_kernels.decode_step(rule, **wide, backend="torch")
    bound = 1e-2 if dtype == BF16 else 1e-5
    assert (y - expected).norm() <= bound * expected.norm()
    assert (x["state"] - wide["state"]).norm() <= bound * wide["state"].norm()
    assert truth(rule, decode_inputs(rule, 3, 4, 128, dtype, "cuda")).isfinite().all()


@pytest.mark.parametrize("batch", [2, 64])
@pytest.mark.parametrize("width", [33, 64, 128, 256])
def test_decoding_at_other_widths_and_batches(width: int, batch: int) -> None:
    x = decode_inputs("gated_efla", batch, 3, width, BF16, "cuda")
    expected = truth("gated_efla", x)
    got = efla_kernels.decode_step("gated_efla", **x, backend="triton")
    assert (got - expected).norm() <= 1e-2 * expected.norm()
