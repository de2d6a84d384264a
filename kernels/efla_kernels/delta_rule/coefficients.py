"""The gates' coefficients, their limits and their gradients, written once for references, chunked forms and kernels.

With lam = |k|^2 the models' coefficients all come from one function, the relative exponential

    E(x) = (1 - exp(-x)) / x,   E(0) = 1                   and its slope  E'(x) = E(x) psi(x),
    psi(x) = (phi(x) - 1) / x,  phi(x) = x / (exp(x) - 1)  (psi(0) = -1/2).

EFLA:        a = beta E(beta lam)                                  exact flow over a step of length beta
Gated EFLA:  e = g beta E(g beta lam),  eta = (1 - g) + g beta lam,  w = beta E(eta),  log_decay = g - 1

Differentiating those formulas term by term loses all digits where it matters (E + x E' for large x; expm1 near 0), so
each backward below is the closed form whose terms share one sign. None of them supports a second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# psi(x) = -1/2 + x * sum_n B_2n/(2n)! x^(2n-2) with Bernoulli numbers B_2n; the first term left out is below 2e-17 at
# the switch point, and the direct form loses less than a factor of five there.
_PSI_SERIES = (
    1 / 12,
    -1 / 720,
    1 / 30240,
    -1 / 1209600,
    1 / 47900160,
    -691 / 1307674368000,
    1 / 74724249600,
)
_PSI_SERIES_BELOW = 0.5


def widened(x: Tensor) -> Tensor:
    """fp32, or fp64 where the input has it: no coefficient is computed in 16 bits."""
    return x if x.dtype == torch.float64 else x.float()


def _relative_exp(x: Tensor) -> Tensor:
    """E(x) in x's dtype; -expm1(-x) / x is accurate for every x but 0."""
    zero = x == 0
    return torch.where(zero, 1.0, -torch.expm1(-x) / torch.where(zero, 1.0, x))


def _psi(x: Tensor) -> Tensor:
    """psi(x) = (x / (exp(x) - 1) - 1) / x, by its series near 0; -1/x for huge x, also at infinity."""
    near = x.abs() < _PSI_SERIES_BELOW
    small = torch.where(near, x, 0.0)
    square = small * small
    series = torch.full_like(x, _PSI_SERIES[-1])
    for coefficient in reversed(_PSI_SERIES[:-1]):
        series = series * square + coefficient
    far = torch.where(near, 1.0, x).clamp(max=torch.finfo(x.dtype).max)
    return torch.where(near, small * series - 0.5, (far / torch.expm1(far) - 1) / far)


def relative_exp_slope(x: Tensor) -> Tensor:
    """E'(x), the slope of `relative_exp`: -1/2 at 0, -1/x^2 for huge x. Dtype of x; not differentiable."""
    wide = widened(x.detach())
    return (_relative_exp(wide) * _psi(wide)).to(x.dtype)


class _RelativeExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _relative_exp(widened(x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = widened(x)
        return (widened(grad) * _relative_exp(wide) * _psi(wide)).to(x.dtype)


def relative_exp(x: Tensor) -> Tensor:
    """E(x) = (1 - exp(-x)) / x with E(0) = 1; value and gradient to a few ulp in every float dtype, for all x >= 0."""
    return _RelativeExp.apply(x)


def _erase_write(beta: Tensor, lam: Tensor) -> Tensor:
    """(1 - exp(-beta lam)) / lam; divided by lam itself, a lam never rounds above 1, as beta E(x) lam does."""
    x = beta * lam
    # beta is the rounded value there, also where lam = 0 or the product leaves the normal range
    return torch.where(x < torch.finfo(x.dtype).eps / 4, beta, -torch.expm1(-x) / lam)


class _EraseWrite(torch.autograd.Function):
    """a(beta, lam): da/dbeta = exp(-beta lam), da/dlam = beta^2 E'(beta lam)."""

    @staticmethod
    def forward(ctx: Any, beta: Tensor, lam: Tensor) -> Tensor:
        ctx.save_for_backward(beta, lam)
        return _erase_write(beta, lam)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        beta, lam = ctx.saved_tensors
        x = beta * lam
        return grad * torch.exp(-x), grad * (beta * beta * _relative_exp(x) * _psi(x))


def erase_write_efla(beta: Tensor, lam: Tensor) -> Tensor:
    """EFLA's coefficient a = (1 - exp(-beta lam)) / lam, a -> beta as lam -> 0, with 0 <= a lam <= 1.

    beta: gate >= 0, any shape; lam = |k|^2 >= 0, same shape. Computed and returned in fp32 (fp64 for fp64 inputs).
    """
    beta, lam = _same_precision(beta, lam)
    return _EraseWrite.apply(beta, lam)


class _GatedCoefficients(torch.autograd.Function):
    """(e, w, log_decay) of Gated EFLA; with x = g beta lam the partial derivatives are

    de/dbeta = g exp(-x)                          dw/dbeta  = exp(-eta) - (1 - g) E'(eta)   (both terms >= 0)
    de/dlam  = (g beta)^2 E'(x)                   dw/dlam   = g beta^2 E'(eta)
    de/dlog_g = g beta exp(-x)                    dw/dlog_g = beta E'(eta) (x - g)          dlog_decay/dlog_g = g
    """

    @staticmethod
    def forward(ctx: Any, beta: Tensor, lam: Tensor, log_g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(beta, lam, log_g)
        g, log_decay = torch.exp(log_g), torch.expm1(log_g)
        e = _erase_write(g * beta, lam)
        w = beta * _relative_exp(g * beta * lam - log_decay)
        return e, w, log_decay

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, de: Tensor, dw: Tensor, dlog_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        beta, lam, log_g = ctx.saved_tensors
        g, one_minus_g = torch.exp(log_g), -torch.expm1(log_g)
        x = g * beta * lam
        eta = one_minus_g + x
        keep = torch.exp(-x)
        slope_x, slope_eta = _relative_exp(x) * _psi(x), _relative_exp(eta) * _psi(eta)
        dbeta = de * g * keep + dw * (torch.exp(-eta) - one_minus_g * slope_eta)
        dlam = de * (g * beta).square() * slope_x + dw * g * beta.square() * slope_eta
        dlog_g = g * beta * de * keep + dw * beta * slope_eta * (x - g) + dlog_decay * g
        return dbeta, dlam, dlog_g


def gated_coefficients(beta: Tensor, lam: Tensor, log_g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gated EFLA's (e, w, log_decay) for the decay parameter g = exp(log_g) in [0, 1].

    e = (1 - exp(-g beta lam)) / lam, w = beta E((1 - g) + g beta lam), log_decay = g - 1. As g -> 0, e -> 0 while w
    stays finite; g = 1 gives e = w = a of EFLA and no decay. All arguments of one shape; fp32 (fp64 for fp64 inputs).
    """
    beta, lam, log_g = _same_precision(beta, lam, log_g)
    return _GatedCoefficients.apply(beta, lam, log_g)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logit: Tensor) -> Tensor:
        ctx.save_for_backward(logit)
        return torch.sigmoid(logit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logit,) = ctx.saved_tensors
        return grad * torch.sigmoid(logit) * torch.sigmoid(-logit)


def beta_gate(beta_logit: Tensor) -> Tensor:
    """beta = sigmoid(beta_logit) in fp32 (fp64 kept); its gradient beta (1 - beta) keeps its digits as beta -> 1."""
    return _Gate.apply(widened(beta_logit))


def squared_norm(k: Tensor) -> Tensor:
    """lam = |k|^2 over the last dimension, fp32 (fp64 kept), of k as it was rounded."""
    return widened(k).square().sum(-1)


def unit_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) over the last dimension, in fp32 (fp64 kept); eps as in flash-linear-attention."""
    wide = widened(x)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)


def scaled_values(v: Tensor, k: Tensor, power: int, eps: float = 1e-6) -> Tensor:
    """v |k|^power with |k| = sqrt(|k|^2 + eps), computed in fp32 (fp64 kept) and returned in v's dtype.

    v: [..., V]; k: [..., K], raw; power: 1 or -1 (ValueError otherwise). eps is that of `unit_norm`, so that value and
    gradient stay finite at k = 0, where a norm clipped from below (1e-12 in the paper) would divide by the clip.

    EFLA is DeltaNet with the gate beta' = 1 - exp(-beta |k|^2) and values v / |k|, since for k^ = k / |k|
    a k k^T = beta' k^ k^T and a k v^T = beta' k^ (v / |k|)^T. So `efla` on v |k| changes the gate alone, and `deltanet`
    on v / |k| the values alone.
    """
    if power not in (1, -1):
        raise ValueError(f"power: expected 1 or -1, got {power}")
    squared = (squared_norm(k) + eps).unsqueeze(-1)
    return (widened(v) * (squared.sqrt() if power == 1 else squared.rsqrt())).to(v.dtype)


def _same_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return tuple(torch.broadcast_tensors(*(t.to(dtype) for t in tensors)))
