"""The chunked forms against the token recurrence in float64: outputs, final states and every gradient."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.launch.chunks import ChunkGrid

from tests.kernels.cases import LENGTHS, OPS, assert_close, make_case

FP32, FP64 = 1e-5, 1e-12


@pytest.mark.parametrize("use_state", [False, True])
@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("op", OPS)
def test_every_length_equals_the_recurrence(op: str, tokens: int, use_state: bool) -> None:
    case = make_case(op, tokens, use_state=use_state)
    ref = case.run("reference", torch.float64)
    assert_close(case.run("torch"), ref, FP32, case.key)
    assert_close(case.run("torch", torch.float64), ref, FP64, case.key)


@pytest.mark.parametrize("op", OPS)
def test_fp32_chunks_equal_fp32_recurrence(op: str) -> None:
    case = make_case(op, 200, seed=3)
    assert_close(case.run("torch"), case.run("reference"), FP32, case.key)


# empty first, middle and last segments; one-token ones; exact chunks; rising lengths, so that sorting must undo itself
PACKINGS = (
    [0, 0, 5, 6, 6, 75, 75],
    [0, 1, 3, 67, 195, 195, 200],
    [0, 64, 128, 130],
    [0, 1, 2, 3],
    [0, 200],
)


@pytest.mark.parametrize("use_state", [False, True])
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_packed_segments_equal_separate_ones(op: str, packing: list[int], use_state: bool) -> None:
    case = make_case(op, packing[-1], batch=1, cu_seqlens=packing, use_state=use_state)
    ref = case.run_segments("reference", torch.float64)
    assert_close(case.run("torch"), ref, FP32, case.key)
    assert_close(case.run("torch", torch.float64), ref, FP64, case.key)
    assert_close(case.run("reference", torch.float64), ref, FP64, case.key)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_an_empty_segment_keeps_its_state(op: str, backend: str) -> None:
    case = make_case(op, 6, batch=1, cu_seqlens=[0, 0, 6, 6])
    got = case.run(backend)
    for n in (0, 2):
        assert torch.equal(got["final_state"][n], case.state[n])
        assert torch.equal(got["dinitial_state"][n], case.grad_state[n])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("packing", [None, [0, 0]], ids=["dense", "packed"])
def test_no_tokens_at_all(op: str, packing: list[int] | None) -> None:
    case = make_case(op, 0, batch=1, cu_seqlens=packing)
    got = case.run("torch")
    assert got["o"].shape[1] == 0 and torch.equal(got["final_state"], case.state)


@pytest.mark.parametrize("op", OPS)
def test_head_widths_that_are_no_multiple_of_anything(op: str) -> None:
    case = make_case(op, 70, batch=1, heads=1, key_width=5, value_width=1)
    assert_close(case.run("torch"), case.run("reference", torch.float64), FP32, case.key)
    case = make_case(op, 130, batch=1, heads=1, key_width=128, value_width=128)
    assert_close(case.run("torch"), case.run("reference", torch.float64), FP32, case.key)


@pytest.mark.parametrize("op", OPS)
def test_many_segments_need_no_loop_over_them(op: str) -> None:
    """600 documents of 0 to 5 tokens behind one of 300: the scan has as many steps as the longest has chunks."""
    lengths = torch.randint(0, 6, (600,), generator=torch.Generator().manual_seed(0))
    offsets = [0, 300, *(300 + lengths.cumsum(0)).tolist()]
    case = make_case(op, offsets[-1], batch=1, cu_seqlens=offsets, key_width=8, value_width=8)
    assert len(ChunkGrid(1, offsets[-1], 64, case.cu_seqlens, torch.device("cpu")).running) == 5
    assert_close(case.run("torch"), case.run("reference", torch.float64), FP32, case.key)
