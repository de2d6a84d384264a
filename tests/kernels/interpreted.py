"""The Triton kernels in Triton's interpreter, fp32, against the float64 recurrence; run by test_triton.py.

Not collected by name: Triton decides at its import whether it interprets, so these tests need a process of their own
with TRITON_INTERPRET=1. Memory handed to the kernels is filled with NaN throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from efla_kernels import backends, efla
from efla_kernels.delta_rule import choices
from efla_kernels.delta_rule import triton_op as ops
from efla_kernels.launch import choices as launch_choices
from efla_kernels.launch import dispatch
from efla_kernels.launch.choices import interpreted
from efla_kernels.selftest.accuracy import OPS, Case, relative_errors
from efla_kernels.selftest.run import poisoned_memory
from torch import Tensor, nn

FP32, BF16 = torch.float32, torch.bfloat16
SMALL = Case("efla", FP32, tokens=70, heads=1, key_width=16, value_width=16)


def case(op: str = "efla", **changes: object) -> Case:
    fields = {**SMALL.__dict__, "op": op, **changes}
    return Case(**fields)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    assert interpreted(), "these tests need TRITON_INTERPRET=1"
    ops.known_problem.cache_clear()  # some tests change what follows from a problem
    with poisoned_memory():
        yield


def check(one: Case, bound: float = 1e-5, seed: int = 0, backend: str = "triton") -> dict[str, Tensor]:
    tensors = one.inputs(seed, "cpu")
    got = one.run(tensors, backend)
    errors = relative_errors(got, one.truth(tensors))
    bad = {name: error for name, error in errors.items() if not error <= bound}
    assert not bad, f"above {bound}: {bad}"
    return got


@pytest.mark.parametrize("op", OPS)
def test_every_op_and_gradient(op: str) -> None:
    check(case(op, batch=2, tokens=70, heads=2, key_width=32))


def test_erase_write_and_decay_as_given() -> None:
    check(case("delta_rule", decay="mixed", tokens=130))
    check(case("delta_rule", decay="mixed", initial=False, final=False))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 130, 200])
def test_every_length(tokens: int) -> None:
    check(case(tokens=tokens, initial=False, batch=2 if tokens < 66 else 1))
    check(case("gated_efla", tokens=tokens))


@pytest.mark.parametrize(("op", "decay"), [("efla", None), ("gated_efla", None), ("delta_rule", "mixed")])
def test_packed_segments(op: str, decay: str | None) -> None:
    packing = (0, 0, 5, 6, 6, 75, 75)
    one = case(op, tokens=75, decay=decay, cu_seqlens=packing)
    got = check(one)
    tensors = one.inputs(0, "cpu")
    for n in (0, 3, 5):  # an empty segment keeps its state and hands its gradient on
        assert torch.equal(got["state"][n], tensors["initial_state"][n])
        assert torch.equal(got["dinitial_state"][n], tensors["d_final"][n])


@pytest.mark.parametrize(
    ("op", "initial", "final"), [("efla", True, True), ("gated_efla", True, False), ("deltanet", False, True)]
)
def test_split_sequences(monkeypatch: pytest.MonkeyPatch, op: str, initial: bool, final: bool) -> None:
    """Five chunks in three segments of two: the last segment is shorter, and its last chunk partial."""
    monkeypatch.setattr(ops, "split_segments", lambda *_, **__: 3)
    check(case(op, tokens=300, initial=initial, final=final, batch=2 if initial else 1))


@pytest.mark.parametrize("op", OPS)
def test_states_kept_and_computed_again_give_the_same(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Bit for bit, whole and split, and the forward op keeps no states."""
    for segments in (1, 3):
        monkeypatch.setattr(ops, "split_segments", lambda *_, count=segments, **__: count)
        one = case(op, tokens=300 if segments > 1 else 70)
        again, kept = check(one, backend="triton_recompute"), check(one)
        assert all(torch.equal(again[name], kept[name]) for name in kept)


@pytest.mark.parametrize(("op", "decay"), [("efla", None), ("gated_efla", None), ("delta_rule", "mixed")])
@pytest.mark.parametrize(("initial", "final"), [(True, True), (True, False), (False, True)])
def test_packed_segments_computed_again(op: str, decay: str | None, initial: bool, final: bool) -> None:
    """The scan of the backward pass leaves outputs out; empty segments and initial states are what they were."""
    one = case(op, tokens=75, decay=decay, cu_seqlens=(0, 0, 5, 6, 6, 75, 75), initial=initial, final=final)
    again, kept = check(one, backend="triton_recompute"), check(one)
    assert all(torch.equal(again[name], kept[name]) for name in kept)


class Seen(dict[Any, Any]):
    """Compiled kernels by key, none kept: the keys that were asked for."""

    def get(self, key: Any, default: Any = None) -> Any:
        return self.setdefault(key, default)


@pytest.mark.parametrize("backend", ["triton", "triton_recompute"])
def test_packed_lengths_ask_for_no_new_kernels(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Forward and backward: variants for multiples of 16 and for others, and none for a length."""
    seen = Seen()
    monkeypatch.setattr(dispatch, "_compiled", seen)
    for tokens in (48, 49):
        packed_run(tokens, backend)
    first = set(seen)
    assert 5 < len(first) < 30
    for tokens in (50, 63, 64, 65, 77, 80):
        packed_run(tokens, backend)
    assert set(seen) == first


def packed_run(tokens: int, backend: str) -> None:
    one = case("gated_efla", tokens=tokens, cu_seqlens=(0, tokens // 3, tokens))
    one.run(one.inputs(0, "cpu"), backend)


def test_what_is_computed_again_is_not_kept() -> None:
    saved = ops.delta.op(*forward_arguments("efla", grad=False)[:-1], False)[2:]
    assert saved[3].numel() == saved[4].numel() == 0 < saved[0].numel()


def test_the_split_is_chosen_by_the_programs_that_run() -> None:
    def segments(batch: int, tokens: int, heads: int) -> int:
        return choices.split_segments(
            sequences=batch, tokens=tokens, heads=heads, key_width=128, value_width=128, columns=64, processors=132
        )

    assert segments(8, 2048, 8) == 1
    assert segments(1, 512, 1) == 1  # too short to gain
    for tokens in (1024, 4133, 16384):
        count, chunks = segments(1, tokens, 1), -(-tokens // choices.CHUNK)
        assert count > 1 and (count - 1) * -(-chunks // count) < chunks, "no segment may be empty"


@pytest.mark.parametrize(("key_width", "value_width"), [(16, 64), (64, 16), (24, 40), (128, 128)])
def test_widths(key_width: int, value_width: int) -> None:
    check(case("gated_efla", key_width=key_width, value_width=value_width))


@pytest.mark.parametrize("op", ["efla", "gated_efla"])
@pytest.mark.parametrize("segments", [1, 3])
def test_blocks_wider_than_the_widths(monkeypatch: pytest.MonkeyPatch, op: str, segments: int) -> None:
    """As 16-bit types have them on a GPU: blocks of 64 around keys and values of 24 and 32."""
    monkeypatch.setattr(choices.Problem, "narrowest", 64)
    monkeypatch.setattr(ops, "split_segments", lambda *_, **__: segments)
    check(case(op, key_width=24, value_width=32, tokens=300 if segments > 1 else 70))


@pytest.mark.parametrize("norm", [1e-2, 10.0, 1e3, None])
def test_norms_of_raw_keys(norm: float | None) -> None:
    check(case("efla", key_norm=norm))
    check(case("gated_efla", key_norm=norm), 2e-5)


def test_near_duplicate_keys() -> None:
    check(case(keys="near", key_norm=8.0), 1e-4)


@pytest.mark.parametrize("decay", ["1", "0.99..1", "1e-20", "0", "0 or 1"])
def test_decays_to_both_ends(decay: str) -> None:
    check(case("gated_efla", decay=decay), 2e-5)
    check(case("gated_deltanet", decay=decay), 2e-5)


def test_one_token_a_row_with_the_batch_inside() -> None:
    """[T, B, ...] transposed with T = 1 counts as contiguous, whatever its stride from token to token."""
    q, k, v, gate = (torch.randn(1, 3, 2, *width).transpose(0, 1) for width in ((16,), (16,), (16,), ()))
    assert q.is_contiguous() and q.stride(1) != 2 * 16
    for got, expected in zip(efla(q, k, v, gate, backend="triton"), efla(q, k, v, gate, backend="torch"), strict=True):
        assert got is expected is None or (got - expected).norm() <= 1e-5 * expected.norm()


def test_views_of_one_projection() -> None:
    check(case(heads=2, batch=2, strided=True))
    qkv = torch.randn(2, 66, 3 * 2 * 16)  # as the models cut it
    q, k, v = qkv.unflatten(-1, (3, 2, 16)).unbind(2)
    gate = torch.randn(2, 66, 4)[..., ::2]
    got, _ = efla(q, k, v, gate, backend="triton")
    expected, _ = efla(q, k, v, gate, backend="torch")
    assert (got - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_16_bit_inputs_are_upcast(dtype: torch.dtype) -> None:
    """The interpreter multiplies bf16 as bit patterns: what comes back must be fp32's result on the rounded inputs."""
    one = case("gated_efla", dtype=dtype)
    tensors = one.inputs(0, "cpu")
    got = one.run(tensors, "triton")
    wide = one.run(tensors, "triton", FP32)
    for name, x in got.items():
        same_as = x.dtype if name in ("state", "dinitial_state", "dlog_g") else dtype
        assert x.dtype == same_as
        assert torch.equal(x, wide[name].to(x.dtype)), name
    truth = one.truth(tensors)
    assert max(relative_errors(got, truth).values()) < 1e-2


def test_without_gradient_nothing_is_kept_and_the_output_is_the_same() -> None:
    one = case("gated_efla", tokens=130)
    tensors = one.inputs(0, "cpu")
    plain = case("gated_efla", tokens=130, gradients=False).run(tensors, "triton")
    full = one.run(tensors, "triton")
    assert torch.equal(plain["o"], full["o"]) and torch.equal(plain["state"], full["state"])


def test_gradients_of_some_inputs_and_of_the_state_alone() -> None:
    tensors = case().inputs(0, "cpu")
    for backend, dtype in (("triton", FP32), ("reference", torch.float64)):
        q, k, v, logit = (tensors[n].to(dtype) for n in ("q", "k", "v", "beta_logit"))
        v.requires_grad_()
        _, state = efla(q, k, v, logit, output_final_state=True, backend=backend)
        (dv,) = torch.autograd.grad(state, v, tensors["d_final"].to(dtype))
        if backend == "triton":
            first = dv
    assert (first - dv).norm() <= 1e-5 * dv.norm()


def test_no_tokens() -> None:
    q = torch.zeros(1, 0, 2, 16)
    state = torch.randn(1, 2, 16, 16)
    o, final = efla(q, q, q, q[..., 0], initial_state=state, output_final_state=True, backend="triton")
    assert o.shape == q.shape and torch.equal(final, state)


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    q, gate = torch.randn(1, 4, 1, 16), torch.randn(1, 4, 1)
    with pytest.raises(ValueError, match="one type"):
        efla(q, q, q.double(), gate, backend="triton")
    with pytest.raises(ValueError, match="one type"):
        efla(q.double(), q.double(), q.double(), gate, backend="triton")
    wide = torch.randn(1, 4, 1, 272)
    with pytest.raises(ValueError, match=r"up to 256.*backend=torch"):
        efla(wide, wide, wide, gate, backend="triton")
    with pytest.raises(ValueError, match=r"cu_seqlens.*never decrease"):
        efla(q, q, q, gate, cu_seqlens=torch.tensor([0, 3, 2, 4]), backend="triton")
    with pytest.raises(ValueError, match="batch size 2"):
        efla(*3 * [q.expand(2, -1, -1, -1)], gate.expand(2, -1, -1), cu_seqlens=torch.tensor([0, 4]), backend="triton")
    monkeypatch.setattr(launch_choices, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="expected CUDA tensors"):
        efla(q, q, q, gate, backend="triton")
    assert backends.resolve_backend("auto", "cpu", "efla") == "torch"


def forward_arguments(op: str, cu_seqlens: Tensor | None = None, grad: bool = True) -> tuple[object, ...]:
    one = case(op, tokens=70)
    x = one.inputs(0, "cpu")
    tensors = [x["q"], x["k"], x["v"], x["beta_logit"], None, x.get("log_g"), x["initial_state"]]
    tensors = [None if t is None else t.requires_grad_(grad) for t in tensors]
    return (*tensors, cu_seqlens, choices.MODES[op], 0.25, 1, True, True)


@pytest.mark.parametrize("op", ["efla", "gated_efla"])
def test_registration_of_the_forward_op(op: str) -> None:
    """Schema, fake tensors, autograd; that it traces is `test_compiled_whole_with_changing_lengths`."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.delta.op, forward_arguments(op), test_utils=tests)


def test_registration_of_the_backward_op() -> None:
    arguments = forward_arguments("gated_efla", grad=False)
    o, final, *saved = ops.delta.op(*arguments)
    backward = (torch.ones_like(o), torch.ones_like(final), *saved, *arguments)
    torch.library.opcheck(ops.delta.backward_op, backward, test_utils=("test_schema", "test_faketensor"))


def test_second_derivatives_are_refused() -> None:
    q, gate = torch.randn(1, 4, 1, 16, requires_grad=True), torch.randn(1, 4, 1)
    o, _ = efla(q, q, q, gate, backend="triton")
    (once,) = torch.autograd.grad(o.square().sum(), q, retain_graph=True)
    (kept,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    assert torch.equal(once, kept)
    with pytest.raises(RuntimeError, match="twice"):
        kept.sum().backward()


class Block(nn.Module):
    """A projection, the op and a projection back: what a compiled model sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 3 * 2 * 16)
        self.gate = nn.Linear(16, 2)
        self.outer = nn.Linear(2 * 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 16)).unbind(2)
        o, _ = efla(q, k, v, self.gate(x), backend="triton")
        return self.outer(o.flatten(2))


def test_compiled_whole_with_changing_lengths() -> None:
    torch.manual_seed(0)
    block = Block()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for tokens in (66, 130, 40):
        x = torch.randn(1, tokens, 16)
        results = []
        for module in (block, compiled):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            results.append((y, *torch.autograd.grad(y.square().sum(), (leaf, *block.parameters()))))
        for got, expected in zip(results[1], results[0], strict=True):
            assert (got - expected).norm() <= 1e-5 * expected.norm()
