"""State-space duality on a GPU: `make selftest` holds every shape and type, this what users of the ops lean on."""

from __future__ import annotations

from dataclasses import replace

import efla_kernels
import pytest
import torch
from efla_kernels.selftest.accuracy import relative_errors
from efla_kernels.selftest.accuracy_ssd import SsdCase
from efla_kernels.selftest.rows import LENGTHS, PACKED, Row
from efla_kernels.selftest.run import poisoned_memory
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16, FP32 = torch.bfloat16, torch.float32
NARROW = {"key_width": 32, "value_width": 32}


def check(case: SsdCase, seed: int = 0) -> dict[str, Tensor]:
    """Output, state and every gradient within the self-test's bounds."""
    tensors = case.inputs(seed, "cuda")
    with poisoned_memory():
        got = case.run(tensors, "triton")
    row = Row("", case)
    errors = relative_errors(got, case.truth(tensors))
    bad = {name: error for name, error in errors.items() if not error <= row.bound(name)}
    assert not bad, bad
    return got


@pytest.mark.parametrize("op", ["mamba2", "ssd"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups(op: str, groups: int) -> None:
    check(SsdCase(op, groups=groups))
    check(SsdCase(op, FP32, groups=groups, **NARROW))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length(tokens: int) -> None:
    check(SsdCase("mamba2", batch=2, tokens=tokens))


def test_packed_documents_with_empty_ones() -> None:
    case = SsdCase("mamba2", tokens=PACKED[-1], cu_seqlens=PACKED)
    got, tensors = check(case), case.inputs(0, "cuda")
    for n in (0, 3, 5):
        assert torch.equal(got["state"][n], tensors["initial_state"][n])


@pytest.mark.parametrize("case", [SsdCase("mamba2", tokens=4133, heads=2), SsdCase("mamba2", tokens=4096, heads=32)])
def test_long_sequences(case: SsdCase) -> None:
    """The first is cut into segments; both go through several heads per program."""
    check(case)
    check(replace(case, initial=False, final=False))


def test_padding_and_views() -> None:
    check(SsdCase("mamba2", batch=2, masked=True, strided=True))


def test_packed_lengths_compile_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward over 20 different T: no variant is per T."""
    from triton import knobs

    compiled: list[str] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **what: compiled.append(str(what.get("src"))))
    counts = []
    for i in range(20):
        tokens = 300 + 37 * i
        case = SsdCase("mamba2", tokens=tokens, cu_seqlens=(0, 100 + i, tokens), initial=False, **NARROW)  # type: ignore[arg-type]
        case.run(case.inputs(i, "cuda"), "triton")
        counts.append(len(compiled))
    assert counts[-1] == counts[4], f"kernels compiled after each length: {counts}"


class Layer(nn.Module):
    """A projection, the op and a projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 4 * 64 + 2 * 64 + 4), nn.Linear(4 * 64, 64)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, u: Tensor) -> Tensor:
        x, B, C, dt = self.inner(u).split([256, 64, 64, 4], -1)
        x, B, C = x.unflatten(-1, (4, 64)), B.unsqueeze(2), C.unsqueeze(2)
        parameters = [p.float() for p in (self.A_log, self.D, self.dt_bias)]
        y, _ = efla_kernels.mamba2(x, dt, parameters[0], B, C, parameters[1], parameters[2])
        return self.outer(y.flatten(2))


def test_compiled_whole_with_changing_lengths() -> None:
    torch.manual_seed(0)
    layer = Layer().cuda().to(BF16)
    compiled = torch.compile(layer, fullgraph=True)
    for tokens in (128, 200, 333):
        u = torch.randn(2, tokens, 64, device="cuda", dtype=BF16)
        results = []
        for module in (layer, compiled):
            leaf = u.clone().requires_grad_()
            y = module(leaf)
            results.append((y, *torch.autograd.grad(y.float().square().sum(), (leaf, *layer.parameters()))))
        for got, expected in zip(results[1], results[0], strict=True):
            assert (got.float() - expected.float()).norm() <= 1e-2 * expected.float().norm()


def captured(function) -> tuple[torch.cuda.CUDAGraph, object]:
    """A CUDA graph of one call, and what the call returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@pytest.mark.parametrize("tokens", [256, 4133])
def test_cuda_graph_of_a_training_step(tokens: int) -> None:
    """Captured once, replayed on new inputs: forward and backward allocate and wait for nothing outside the graph."""
    case = SsdCase("mamba2", tokens=tokens)
    held, fresh = case.inputs(0, "cuda"), case.inputs(1, "cuda")
    graph, got = captured(lambda: case.run(held, "triton"))
    for name, x in fresh.items():
        held[name].copy_(x)
    graph.replay()
    expected = case.run(fresh, "triton")
    assert isinstance(got, dict)
    for name, x in got.items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_decoding_steps_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """Three tokens by replay, the state moving on in place, against float64."""
    case = SsdCase("mamba2_step", dtype, batch=3, heads=32)
    tensors = case.inputs(0, "cuda")
    expected = case.truth(tensors)
    token = {n: tensors[n][:, 0].clone() for n in ("x", "dt", "B", "C")}
    parameters = {n: tensors[n] for n in ("A_log", "D", "dt_bias")}
    state = tensors["initial_state"].clone()
    graph, y = captured(lambda: efla_kernels.mamba2_step(**token, **parameters, state=state, backend="triton"))
    state.copy_(tensors["initial_state"])
    assert isinstance(y, Tensor)
    outputs = []
    for t in range(3):
        for name, held in token.items():
            held.copy_(tensors[name][:, t])
        graph.replay()
        outputs.append(y.clone())
    errors = relative_errors({"o": torch.stack(outputs, 1), "state": state}, expected)
    assert max(errors.values()) <= (1e-2 if dtype == BF16 else 1e-5), errors
