"""The fused linear cross-entropy in Triton's interpreter; run by test_loss.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from efla_kernels.layers import cross_entropy_kernels as cross_entropy
from torch import Tensor


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden.double() @ weight.double().t()
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("most_held", [cross_entropy.MOST_HELD, 0])
@pytest.mark.parametrize(("tokens", "vocabulary", "spread"), [(20, 5001, 1.0), (1, 17, 1.0), (9, 4096, 30.0)])
def test_fused_equals_float64(
    tokens: int, vocabulary: int, spread: float, most_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in uneven blocks, held or read twice, vocabularies off the block, logits beyond exp's range."""
    monkeypatch.setattr(cross_entropy, "MOST_HELD", most_held)
    monkeypatch.setattr(cross_entropy, "BLOCK", 1024)
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(tokens, 16, generator=generator) * spread).requires_grad_()
    weight = torch.randn(vocabulary, 16, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    loss = cross_entropy.fused_linear_cross_entropy(hidden, weight, targets, rows=7)
    truth = reference(hidden, weight, targets)
    assert abs(loss.item() / truth.item() - 1) < 1e-6
    ours = torch.autograd.grad(loss * 0.25, (hidden, weight))
    theirs = torch.autograd.grad(truth * 0.25, (hidden, weight))
    for got, expected in zip(ours, theirs, strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_ignored_targets_cost_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(6, 16, generator=generator).requires_grad_()
    weight = torch.randn(40, 16, generator=generator).requires_grad_()
    targets = torch.tensor([3, -100, 5, -100, -100, 39])
    kept = targets >= 0
    loss = cross_entropy.fused_linear_cross_entropy(hidden, weight, targets, rows=6)
    alone = cross_entropy.fused_linear_cross_entropy(hidden[kept], weight, targets[kept], rows=3)
    torch.testing.assert_close(loss, alone)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    assert not d_hidden[~kept].any()
    torch.testing.assert_close(d_weight, torch.autograd.grad(alone, weight)[0])
    nothing = cross_entropy.fused_linear_cross_entropy(hidden, weight, torch.full((6,), -100), rows=6)
    assert nothing.item() == 0 and not torch.autograd.grad(nothing, hidden)[0].any()


def test_without_gradients_the_same_loss() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(6, 16, generator=generator), torch.randn(40, 16, generator=generator)
    targets = torch.arange(6)
    with torch.no_grad():
        loss = cross_entropy.fused_linear_cross_entropy(hidden, weight, targets, rows=6)
    assert abs(loss.item() / reference(hidden, weight, targets).item() - 1) < 1e-6


@pytest.mark.parametrize("gradients", [False, True])
def test_the_op_is_well_formed(gradients: bool) -> None:
    """Fake tensors, autograd and schema; without gradients nothing asks for them."""
    hidden, weight = torch.randn(6, 16), torch.randn(40, 16)
    leaves = [x.requires_grad_(gradients) for x in (hidden, weight)]
    torch.library.opcheck(cross_entropy.cross_entropy_op.op, (*leaves, torch.arange(6), 4, gradients))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("vocabulary", [1000, 2048, 5001])
def test_a_16_bit_gradient_takes_the_place_of_the_logits(vocabulary: int, held: bool) -> None:
    """Rows of fp16 over their own fp32 logits, held or in several blocks of columns."""
    generator = torch.Generator().manual_seed(3)
    buffer = torch.randn(5, vocabulary, generator=generator) * 3
    targets, losses = torch.tensor([0, vocabulary - 1, -100, 700, 999]), torch.empty(5)
    scores = buffer.double()
    log_p = torch.log_softmax(scores, -1)
    expected = log_p.exp()
    expected[torch.arange(5), targets.clamp(min=0)] -= 1
    expected[2] = 0
    rows = buffer.view(torch.float16)
    cross_entropy.cross_entropy_kernel[(5,)](
        buffer, rows, targets, losses, vocabulary, rows.stride(0), GRADIENT=True,
        BLOCK=8192 if held else 1024, HELD=held, AHEAD=0,
    )  # fmt: skip
    assert (rows[:, :vocabulary].double() - expected).norm() <= 1e-3 * expected.norm()
    counted = [0, 1, 3, 4]
    by_hand = -log_p[torch.arange(5), targets.clamp(min=0)]
    torch.testing.assert_close(losses.double()[counted], by_hand[counted], rtol=1e-5, atol=1e-5)
    assert losses[2] == 0


@pytest.mark.parametrize("held", [True, False])
def test_rows_of_extremes(held: bool) -> None:
    """Logits of -inf, all far below or above 0, a peak; an ignored row whose logits are all -inf; in fp32, in place."""
    buffer = torch.randn(6, 3000, generator=torch.Generator().manual_seed(6))
    buffer[0, :2000] = float("-inf")
    buffer[1] -= 1000
    buffer[2] += 1000
    buffer[3, 17] = 90
    buffer[4, 1024:] = float("-inf")
    buffer[5] = float("-inf")
    targets, losses = torch.tensor([2500, 3, 2999, 17, 0, -100]), torch.full((6,), float("nan"))
    log_p = torch.log_softmax(buffer[:5].double(), -1)
    expected = log_p.exp()
    expected[torch.arange(5), targets[:5]] -= 1
    cross_entropy.cross_entropy_kernel[(6,)](
        buffer, buffer, targets, losses, 3000, 3000, GRADIENT=True, BLOCK=4096 if held else 1024, HELD=held, AHEAD=0
    )
    torch.testing.assert_close(losses[:5].double(), -log_p[torch.arange(5), targets[:5]], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(buffer[:5].double(), expected, rtol=2e-6, atol=1e-7)
    assert losses[5] == 0 and not buffer[5].any()


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("whole", [True, False])
def test_an_ignored_row_gets_zeros_whatever_its_logits_are(whole: bool, number: float, held: bool) -> None:
    """Padding may hold anything: its row's loss and gradient are 0, and the rows around it are what they were."""
    rows = torch.randn(3, 3000, generator=torch.Generator().manual_seed(7))
    targets, losses = torch.tensor([5, -100, 2999]), torch.full((3,), float("nan"))
    expected = rows.double().softmax(-1)
    expected[[0, 2], [5, 2999]] -= 1
    rows[1, :: 1 if whole else 7] = number
    cross_entropy.cross_entropy_kernel[(3,)](
        rows, rows, targets, losses, 3000, 3000, GRADIENT=True, BLOCK=4096 if held else 1024, HELD=held, AHEAD=0
    )
    assert losses[1] == 0 and not rows[1].any()
    assert losses.isfinite().all()
    torch.testing.assert_close(rows[[0, 2]].double(), expected[[0, 2]], rtol=2e-6, atol=1e-7)


def test_launch_shapes() -> None:
    """Every row that registers hold has 32 columns in a thread."""
    device = torch.device("cpu")
    shapes = {V: cross_entropy.launch_shape(V, device) for V in (2, 1024, 1025, 32000, 32768, 32769, 128256)}
    assert [shape["HELD"] for shape in shapes.values()] == [True] * 5 + [False] * 2
    assert [shape["BLOCK"] for shape in shapes.values()] == [1024, 1024, 2048, 32768, 32768, 16384, 16384]
    assert [shape["num_warps"] for shape in shapes.values()] == [1, 1, 2, 32, 32, 32, 32]


def test_the_incoming_gradient_is_not_rounded() -> None:
    """1 / 1000 lies 0.1 % off the nearest bf16 number and would scale the whole gradient by that."""
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(4)).to(torch.float16)
    factor = torch.tensor(1e-3)
    got = cross_entropy._scaled(x, factor, torch.float16)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, (x.float() * factor).half())
    wide = torch.randn(3, 1000, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(cross_entropy._scaled(wide, factor, torch.float16), (wide * factor).half())
