"""Coefficients and their gradients against 345-digit decimal arithmetic, through every limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import product

import pytest
import torch
from efla_kernels import beta_gate, erase_write_efla, gated_coefficients, relative_exp, relative_exp_slope
from torch import Tensor

# Central differences: all functions are smooth on the scale of the step, whose truncation error is below 1e-48, and
# the digits left after the subtraction reach below the smallest float64 number.
DIGITS = 345
STEP = Decimal(10) ** -30
DTYPES = [torch.float64, torch.float32]


def exact_relative_exp(x: Decimal) -> Decimal:
    return (1 - (-x).exp()) / x if x else Decimal(1)


def exact_a(beta: Decimal, lam: Decimal) -> Decimal:
    return beta * exact_relative_exp(beta * lam)


def exact_w(beta: Decimal, lam: Decimal, log_g: Decimal) -> Decimal:
    g = log_g.exp()
    return beta * exact_relative_exp((1 - g) + g * beta * lam)


def exact_e(beta: Decimal, lam: Decimal, log_g: Decimal) -> Decimal:
    return exact_a(log_g.exp() * beta, lam)


def exact_partials(f: Callable[..., Decimal], arguments: tuple[float, ...]) -> tuple[float, list[float]]:
    """f and its partial derivatives at the very numbers that the floats hold."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = DIGITS, -(10**6), 10**6
        at = [Decimal(x) for x in arguments]
        partials = []
        for i, x in enumerate(at):
            above, below = ([*at[:i], x + step, *at[i + 1 :]] for step in (STEP, -STEP))
            partials.append(float((f(*above) - f(*below)) / (2 * STEP)))
        return float(f(*at)), partials


def assert_ulps(got: Tensor, expected: list[float], ulps: float | Tensor, size: Tensor | None = None) -> None:
    """|got - expected| <= ulps * eps * size (|expected| by default), with the subnormal range forgiven."""
    info = torch.finfo(got.dtype)
    ref = torch.tensor(expected, dtype=torch.float64)
    bound = ulps * info.eps * (ref.abs() if size is None else size) + info.tiny
    error = (got.detach().double() - ref).abs()
    assert torch.isfinite(got).all()
    worst = int((error / bound).argmax())
    assert (error <= bound).all(), f"index {worst}: got {got[worst].item()}, expected {expected[worst]}"


POINTS = [0.0, 1e-30, 1e-12, 1e-8, 1e-6, 1e-3, 0.01, 0.3, 0.499, 0.4999999, 0.5, 0.500001, 0.7, 1.0, 2.0, 5.0]
POINTS += [16.0, 30.0, 80.0, 88.5, 90.0, 105.0, 700.0, 720.0, 1e4, 1e10]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16], ids=str)
def test_relative_exp_and_its_slope(dtype: torch.dtype) -> None:
    x = torch.tensor([p for p in POINTS if p < torch.finfo(dtype).max], dtype=dtype).requires_grad_()
    exact = [exact_partials(exact_relative_exp, (p,)) for p in x.tolist()]
    value = relative_exp(x)
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert value.dtype == slope.dtype == dtype
    # below half an ulp of each narrow type comes from the final rounding alone
    ulps = 8.0 if dtype in DTYPES else 0.51
    assert_ulps(value, [v for v, _ in exact], ulps)
    assert_ulps(slope, [p[0] for _, p in exact], ulps)
    assert torch.equal(relative_exp_slope(x), slope)


def test_relative_exp_where_floats_end() -> None:
    for dtype in DTYPES:
        x = torch.tensor([0.0, torch.finfo(dtype).max, torch.inf], dtype=dtype, requires_grad=True)
        value = relative_exp(x)
        (slope,) = torch.autograd.grad(value.sum(), x)
        assert value[0] == 1 and slope[0] == -0.5
        assert value[2] == 0 and torch.equal(slope[1:], torch.zeros(2, dtype=dtype))


BETAS = [1e-20, 1e-6, 0.25, 0.9, 1.0]
LAMS = [1e-24, 1e-12, 1e-4, 0.3, 7.0, 60.0, 6.4e5]
LOG_GS = [0.0, -1e-12, -1e-6, -1e-3, -0.2, -4.0, -60.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_efla_coefficient_and_gradients(dtype: torch.dtype) -> None:
    beta, lam = (torch.tensor(x, dtype=dtype).requires_grad_() for x in zip(*product(BETAS, LAMS), strict=True))
    a = erase_write_efla(beta, lam)
    dbeta, dlam = torch.autograd.grad(a.sum(), (beta, lam))
    exact = [exact_partials(exact_a, at) for at in zip(beta.tolist(), lam.tolist(), strict=True)]
    x = (beta * lam).detach().double()
    assert_ulps(a, [v for v, _ in exact], 8)
    # exp(-x) magnifies the rounding of x = beta lam by x; beyond its range both are zero
    assert_ulps(dbeta, [p[0] for _, p in exact], 8 + x)
    assert_ulps(dlam, [p[1] for _, p in exact], 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_coefficients_and_gradients(dtype: torch.dtype) -> None:
    points = list(product(BETAS, LAMS, LOG_GS))
    arguments = [torch.tensor(x, dtype=dtype).requires_grad_() for x in zip(*points, strict=True)]
    at = list(zip(*(x.tolist() for x in arguments), strict=True))
    e, w, log_decay = gated_coefficients(*arguments)
    beta, lam, log_g = (x.detach().double() for x in arguments)
    g, x = log_g.exp(), log_g.exp() * beta * lam
    eta = x - torch.expm1(log_g)
    # rounding of log_g reaches g magnified by |log_g|, and that of x and eta reaches exp(-x) magnified by x
    ulps = 16 + 2 * log_g.abs() + x * (1 + log_g.abs())
    for name, value, f in (("e", e, exact_e), ("w", w, exact_w)):
        exact = [exact_partials(f, point) for point in at]
        partials = torch.autograd.grad(value.sum(), arguments, retain_graph=True)
        assert_ulps(value, [v for v, _ in exact], 16 + 2 * log_g.abs())
        for i, partial in enumerate(partials):
            size = None
            if name == "w" and i == 2:  # beta E'(eta) (x - g): two terms of true opposite sign
                size = beta * relative_exp_slope(eta).abs() * (x + g)
            assert_ulps(partial, [p[i] for _, p in exact], ulps, size)
    none_beta, none_lam, slope = torch.autograd.grad(log_decay.sum(), arguments)
    assert not none_beta.any() and not none_lam.any()
    assert_ulps(log_decay, [math.expm1(point[2]) for point in at], 2)
    assert_ulps(slope, [math.exp(point[2]) for point in at], 2)


def test_limits_of_the_gated_coefficients() -> None:
    beta = torch.rand(1000, dtype=torch.float64)
    lam = 10 ** (8 * torch.rand(1000, dtype=torch.float64) - 4)
    a = erase_write_efla(beta, lam)
    e, w, log_decay = gated_coefficients(beta, lam, torch.zeros_like(beta))
    assert torch.equal(e, a) and torch.equal(log_decay, torch.zeros_like(a))
    torch.testing.assert_close(w, a, rtol=1e-15, atol=0)
    for log_g in (-1e4, -torch.inf):  # g = 0: nothing erased, a whole unit of decay, and a finite write
        e, w, log_decay = gated_coefficients(beta, lam, torch.full_like(beta, log_g))
        assert torch.equal(e, torch.zeros_like(e)) and torch.equal(log_decay, -torch.ones_like(e))
        torch.testing.assert_close(w, beta * (1 - torch.exp(torch.tensor(-1.0, dtype=torch.float64))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_transition_never_leaves_zero_to_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(2, 300_000, generator=generator, dtype=dtype)
    beta, lam = torch.sigmoid(40 * u[0] - 20), 10 ** (40 * u[1] - 20)
    eps = torch.finfo(dtype).eps
    a_lam = erase_write_efla(beta, lam) * lam
    assert a_lam.min() >= 0 and a_lam.max() <= 1
    torch.testing.assert_close(a_lam, -torch.expm1(-beta * lam), rtol=eps, atol=0)
    e, w, log_decay = gated_coefficients(beta, lam, -20 * u[0].flip(0))
    assert (e * lam).min() >= 0 and (e * lam).max() <= 1
    assert (w >= 0).all() and (w <= beta * (1 + eps)).all() and (log_decay >= -1).all() and (log_decay <= 0).all()


def test_beta_gate_keeps_its_gradient_near_one() -> None:
    points = [-100.0, -20.0, -1.0, 0.0, 3.0, 8.0, 17.0, 40.0, 85.0]
    logit = torch.tensor(points, requires_grad=True)
    (grad,) = torch.autograd.grad(beta_gate(logit).sum(), logit)
    assert_ulps(grad, exact_sigmoid_slopes(points), 8)


def exact_sigmoid_slopes(points: list[float]) -> list[float]:
    return [exact_partials(lambda x: 1 / (1 + (-x).exp()), (p,))[1][0] for p in points]


def test_coefficients_are_never_computed_in_16_bits() -> None:
    beta, lam = torch.rand(64).bfloat16(), (10 * torch.rand(64)).bfloat16()
    log_g = -torch.rand(64).bfloat16()
    wide = [x.float() for x in (beta, lam, log_g)]
    assert torch.equal(erase_write_efla(beta, lam), erase_write_efla(*wide[:2]))
    for narrow, full in zip(gated_coefficients(beta, lam, log_g), gated_coefficients(*wide), strict=True):
        assert narrow.dtype == torch.float32 and torch.equal(narrow, full)
    assert beta_gate(beta).dtype == torch.float32
