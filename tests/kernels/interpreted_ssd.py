"""State-space duality's Triton kernels in Triton's interpreter, fp32, against the float64 recurrence.

Not collected by name; run by test_triton.py in a process with TRITON_INTERPRET=1, as `interpreted.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from efla_kernels import backends, fuses_mamba2_step, mamba2, mamba2_step, ssd
from efla_kernels.launch.choices import interpreted
from efla_kernels.selftest.accuracy import relative_errors
from efla_kernels.selftest.accuracy_ssd import SsdCase
from efla_kernels.selftest.run import poisoned_memory
from efla_kernels.ssd import launch as ssd_launch
from efla_kernels.ssd import triton_op as ssd_ops
from efla_kernels.ssd.choices import Block, Choice, Problem
from torch import Tensor

FP32, BF16 = torch.float32, torch.bfloat16
SMALL = SsdCase("mamba2", FP32, tokens=70, heads=2, key_width=16, value_width=16)
# sums over tokens of differences of decays, whose digits the cumulative sums of a chunk limit
DECAYS = ("ddt", "dlog_decay", "dA_log", "ddt_bias")


def case(op: str = "mamba2", **changes: object) -> SsdCase:
    return SsdCase(**{**SMALL.__dict__, "op": op, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    assert interpreted(), "these tests need TRITON_INTERPRET=1"
    ssd_ops.known_problem.cache_clear()  # some tests change what follows from a problem
    with poisoned_memory():
        yield


def check(one: SsdCase, bound: float = 1e-5, seed: int = 0, backend: str = "triton") -> dict[str, Tensor]:
    tensors = one.inputs(seed, "cpu")
    got = one.run(tensors, backend)
    errors = relative_errors(got, one.truth(tensors))
    bad = {name: e for name, e in errors.items() if not e <= (5 * bound if name in DECAYS else bound)}
    assert not bad, f"above {bound}: {bad}"
    return got


@pytest.mark.parametrize("op", ["mamba2", "ssd"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_and_every_gradient(op: str, groups: int) -> None:
    check(case(op, batch=2, heads=4, groups=groups))


@pytest.mark.parametrize("heads", [3, 6])
def test_heads_that_no_power_of_two_divides(heads: int) -> None:
    check(case(heads=heads, groups=heads // 3, tokens=65))


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
def test_every_length(tokens: int) -> None:
    check(case(tokens=tokens, batch=2 if tokens < 66 else 1, initial=tokens % 2 == 0, final=tokens % 3 != 0))


@pytest.mark.parametrize("op", ["mamba2", "ssd"])
def test_packed_segments(op: str) -> None:
    packing = (0, 0, 5, 6, 6, 75, 75)
    one = case(op, tokens=75, cu_seqlens=packing)
    got = check(one)
    tensors = one.inputs(0, "cpu")
    for n in (0, 3, 5):  # an empty segment keeps its state and hands its gradient on
        assert torch.equal(got["state"][n], tensors["initial_state"][n])
        assert torch.equal(got["dinitial_state"][n], tensors["d_final"][n])


def test_padding_neither_writes_nor_decays() -> None:
    check(case(masked=True, groups=2))
    one = case(masked=True)
    tensors = one.inputs(0, "cpu")
    tensors["dt_mask"][:] = False
    got = one.run(tensors, "triton")
    assert torch.equal(got["state"], tensors["initial_state"])
    assert not got["ddt"].any() and not got["dA_log"].any() and not got["dB"].any()


@pytest.mark.parametrize("steps", ["tiny", "large", "0 or large"])
def test_steps_at_both_ends(steps: str) -> None:
    check(case(steps=steps, tokens=130))


@pytest.mark.parametrize(("key_width", "value_width"), [(128, 64), (64, 128), (24, 40), (48, 20)])
def test_widths(key_width: int, value_width: int) -> None:
    check(case(key_width=key_width, value_width=value_width, heads=1))


def test_views_of_the_projections() -> None:
    check(case(batch=2, strided=True, groups=2))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("rows", [64, 128])
def test_the_block_shapes_of_16_bit_inputs(monkeypatch: pytest.MonkeyPatch, rows: int, tma: bool) -> None:
    """Chunks of 128 tokens as one block of rows or two, states in two blocks, several heads each, and descriptors."""
    tile = Block(rows, 4, 1)
    monkeypatch.setattr(Problem, "choice", Choice(128, Block(16, 4, 1), tile, tile, tile))
    monkeypatch.setattr(ssd_launch, "_tma", lambda *_: tma)
    monkeypatch.setattr(Problem, "heads_each", lambda p, places, least=4: 2)
    check(case(tokens=300, heads=4, key_width=32))
    check(case(tokens=200, key_width=32, steps="0 or large"))
    check(case("ssd", tokens=75, cu_seqlens=(0, 0, 5, 6, 6, 75, 75), key_width=32))


@pytest.mark.parametrize("initial", [False, True])
def test_split_sequences(monkeypatch: pytest.MonkeyPatch, initial: bool) -> None:
    """Five chunks in three segments of two: the last segment is shorter, and its last chunk partial."""
    monkeypatch.setattr(Problem, "segments", lambda p: (3, 2))
    check(case(tokens=150, batch=2, heads=1, initial=initial, final=initial))


def problem(batch: int, tokens: int, heads: int) -> Problem:
    return Problem(batch, tokens, heads, 1, 128, 64, batch, BF16, False, 132)


def test_the_split_is_chosen_by_the_programs_that_run() -> None:
    assert problem(8, 2048, 32).segments() == (1, 16)
    assert problem(1, 1024, 1).segments()[0] == 1  # too short to gain
    for tokens in (2048, 4133, 16384):
        one = problem(1, tokens, 8)
        count, each = one.segments()
        assert count > 1 and (count - 1) * each < one.chunks, "no segment may be empty"
    for tokens in (128, 16384):
        each = problem(1, tokens, 24).heads_each(2)
        assert 24 % each == 0
    assert problem(1, 128, 24).heads_each(2) == 1
    for heads in (16, 24, 32, 64):  # all at once, two programs per multiprocessor
        one = problem(8, 2048, heads)
        assert 0.9 < one.chunks * heads / one.heads_each(1, 2) / (2 * one.processors) <= 1


def test_recomputed_states_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Problem, "segments", lambda p: (2, 2))
    for one in (case(tokens=100), case(tokens=100, initial=False)):
        again, kept = check(one, backend="triton_recompute"), check(one)
        for name, x in kept.items():
            assert torch.equal(x, again[name]), name


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_16_bit_inputs_are_upcast(dtype: torch.dtype) -> None:
    one = case(dtype=dtype)
    tensors = one.inputs(0, "cpu")
    got = one.run(tensors, "triton")
    for name, x in got.items():
        wide = name in ("state", "dinitial_state", "dA_log", "dD", "ddt_bias")
        assert x.dtype == (FP32 if wide else dtype), name
    assert max(relative_errors(got, one.truth(tensors)).values()) < 1e-2


def test_without_gradient_the_output_is_the_same() -> None:
    one = case(tokens=130)
    tensors = one.inputs(0, "cpu")
    plain = replace(one, gradients=False).run(tensors, "triton")
    full = one.run(tensors, "triton")
    assert torch.equal(plain["o"], full["o"]) and torch.equal(plain["state"], full["state"])


def test_gradient_of_the_state_alone() -> None:
    tensors = case("ssd").inputs(0, "cpu")
    found = {}
    for backend, dtype in (("triton", FP32), ("reference", torch.float64)):
        x, dt, decay, B, C = (tensors[n].to(dtype) for n in ("x", "dt", "log_decay", "B", "C"))
        B.requires_grad_()
        _, state = ssd(x, dt, decay, B, C, output_final_state=True, backend=backend)
        (found[backend],) = torch.autograd.grad(state, B, tensors["d_final"].to(dtype))
    assert (found["triton"] - found["reference"]).norm() <= 1e-5 * found["reference"].norm()


def test_no_tokens() -> None:
    x, B = torch.zeros(1, 0, 2, 16), torch.zeros(1, 0, 1, 16)
    state = torch.randn(1, 2, 16, 16)
    y, final = ssd(
        x, x[..., 0], x[..., 0], B, B, initial_state=state, output_final_state=True, backend="triton"
    )  # fmt: skip
    assert y.shape == x.shape and torch.equal(final, state)


@pytest.mark.parametrize("masked", [False, True])
def test_decoding_steps(masked: bool) -> None:
    for one in (case("mamba2_step", batch=3, heads=4, groups=2, masked=masked), case("mamba2_step", value_width=40)):
        check(one)
        errors = relative_errors(one.run(one.inputs(1, "cpu"), "torch"), one.truth(one.inputs(1, "cpu")))
        assert max(errors.values()) <= 1e-5


def test_a_step_reads_rows_of_a_projection() -> None:
    rows = torch.randn(3, 2 * 16 + 2 * 16 + 2)
    x, B, C, dt = rows.split([32, 16, 16, 2], -1)
    given = [x.unflatten(-1, (2, 16)), dt, torch.zeros(2), B.unsqueeze(1), C.unsqueeze(1), torch.ones(2), torch.ones(2)]
    start = torch.randn(3, 2, 16, 16)
    states = [start.clone(), start.clone()]
    got, expected = (mamba2_step(*given, s, backend=b) for s, b in zip(states, ("triton", "torch"), strict=True))
    assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert (states[0] - states[1]).norm() <= 1e-5 * states[1].norm()


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x, dt, B, h = torch.randn(1, 4, 2, 16), torch.randn(1, 4, 2), torch.randn(1, 4, 1, 16), torch.ones(2)
    with pytest.raises(ValueError, match="one type"):
        mamba2(x, dt, h, B.double(), B, h, h, backend="triton")
    wide = torch.randn(1, 4, 1, 520)
    with pytest.raises(ValueError, match=r"N P up to 8192 .*got N=520, P=16; use backend=torch"):
        mamba2(x, dt, h, wide, wide, h, h, backend="triton")
    with pytest.raises(ValueError, match=r"cu_seqlens.*never decrease"):
        mamba2(x, dt, h, B, B, h, h, cu_seqlens=torch.tensor([0, 3, 2, 4]), backend="triton")
    with pytest.raises(ValueError, match="without gradient"):
        mamba2(x, dt, h, B, B, h, h, dt_mask=torch.ones(1, 4, requires_grad=True), backend="triton")
    state = torch.zeros(1, 2, 16, 16)
    with pytest.raises(ValueError, match="in place"):
        mamba2_step(x[:, 0], dt[:, 0], h, B[:, 0], B[:, 0], h, h, state.transpose(2, 3), backend="triton")
    monkeypatch.setattr(ssd_ops, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="expected CUDA tensors"):
        mamba2(x, dt, h, B, B, h, h, backend="triton")
    assert backends.resolve_backend("auto", "cpu", "mamba2") == "torch"
    assert fuses_mamba2_step("triton", torch.device("cpu")) and not fuses_mamba2_step("torch", torch.device("cpu"))


NAMES = ("x", "dt", "B", "C", "log_decay", "A_log", "dt_bias", "D", "dt_mask", "initial_state")


@pytest.mark.parametrize("op", ["mamba2", "ssd"])
def test_registration(op: str) -> None:
    """Schemas, fake tensors, autograd of both ops; that they trace is `test_compiled_whole_with_changing_lengths`."""
    x = case(op, masked=op == "mamba2").inputs(0, "cpu")
    tensors = [x[n].requires_grad_(n != "dt_mask") if n in x else None for n in NAMES]
    arguments = (*tensors, None, True, True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ssd_ops.ssd_forward, arguments, test_utils=tests)
    tensors = [None if t is None else t.detach() for t in tensors]
    y, final, table, states = ssd_ops.ssd_forward(*tensors, None, True, True)
    backward = (y, final, table, states, *tensors, None)
    torch.library.opcheck(ssd_ops.ssd_backward, backward, test_utils=("test_schema", "test_faketensor"))


def test_registration_of_the_step() -> None:
    x = case("mamba2_step", masked=True).inputs(0, "cpu")
    token = [x[n][:, 0] for n in ("x", "dt", "B", "C", "dt_mask")]
    arguments = (
        token[0], token[1], x["A_log"], token[2], token[3], x["D"], x["dt_bias"], token[4], x["initial_state"],
    )  # fmt: skip
    torch.library.opcheck(ssd_ops.ssd_step, arguments)
