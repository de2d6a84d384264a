"""Gate coefficients inside kernels: `coefficients.py` for tiles of fp32 registers.

With beta = sigmoid(logit), lam = |k|^2 of the key as it was rounded, g = exp(log_g), keys taken raw in all five modes:

    RAW             erase, write, log_decay as they were given
    DELTANET        erase = beta r^2, write = beta r, r = (lam + 1e-6)^(-1/2): the key's norm moved into them
    EFLA            erase = write = a = beta E(beta lam)
    GATED_DELTANET  as DELTANET, log_decay = log_g
    GATED_EFLA      erase = g beta E(x), write = beta E(eta), x = g beta lam, eta = 1 - g + x, log_decay = g - 1

Gradients are taken in logarithms: s_e = dL/d ln erase and s_w = dL/d ln write arrive from the algebra without a
division, and d ln E / d ln x = phi(x) - 1 with phi(x) = x / (exp(x) - 1); psi(x) = (phi(x) - 1) / x keeps its digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

RAW = tl.constexpr(0)
DELTANET = tl.constexpr(1)
EFLA = tl.constexpr(2)
GATED_DELTANET = tl.constexpr(3)
GATED_EFLA = tl.constexpr(4)

NORM_EPS = tl.constexpr(1e-6)
# A decay of exp(-32) = 1e-14 is nothing in fp32; cutting there keeps the digits of the chunk's cumulative sum.
LOWEST_LOG_DECAY = tl.constexpr(-32.0)


@triton.jit
def decay_pairs(x, factor, b, LATER: tl.constexpr, BOUNDED: tl.constexpr):
    """x times factor_t exp(b_t - b_s) for pairs of a token t and an earlier one s: t runs along axis LATER of x.

    b, the chunk's sums of log_decay, never grows. BOUNDED: every log_decay is -1 or more, so that the exponential may
    be taken apart, exp(b_t - m) exp(m - b_s) with m in the middle of b's range, and no pair needs one of its own (up to
    32 from m the argument's rounding costs 2e-6). Pairs of a later s have no meaning and may be large.
    """
    if BOUNDED:
        middle = 0.5 * tl.min(b, 0)
        later = factor * tl.exp(b - middle)
        earlier = tl.exp(middle - b)
        if LATER == 0:
            return x * later[:, None] * earlier[None, :]
        else:
            return x * later[None, :] * earlier[:, None]  # in this order: the same numbers for a pair and its mirror
    else:
        x *= tl.exp(-tl.abs(b[:, None] - b[None, :]))
        if LATER == 0:
            return x * factor[:, None]
        else:
            return x * factor[None, :]


@triton.jit
def expm1(x):
    """exp(x) - 1 for x <= 0: a series near 0, where the difference would lose its digits."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720))))))
    return tl.where(x > -0.25, series, tl.exp(x) - 1.0)


@triton.jit
def relative_exp(x):
    """E(x) = (1 - exp(-x)) / x for x >= 0, E(0) = 1."""
    series = 1.0 - x * (0.5 - x * (1.0 / 6 - x * (1.0 / 24 - x * (1.0 / 120 - x * (1.0 / 720)))))
    return tl.where(x < 0.25, series, (1.0 - tl.exp(-x)) / tl.maximum(x, 0.25))


@triton.jit
def phi_psi(x):
    """phi(x) = x / (exp(x) - 1) and psi(x) = (phi(x) - 1) / x for x >= 0; phi(0) = 1, psi(0) = -1/2."""
    y = x * x
    series = -0.5 + x * (1.0 / 12 - y * (1.0 / 720 - y * (1.0 / 30240 - y * (1.0 / 1209600))))
    far = tl.maximum(x, 0.5)
    decay = tl.exp(-far)
    phi_far = far * decay / (1.0 - decay)
    psi = tl.where(x < 0.5, series, (phi_far - 1.0) / far)
    phi = tl.where(x < 0.5, 1.0 + x * series, phi_far)
    return phi, psi


@triton.jit
def coefficients(mode: tl.constexpr, gate, decay, lam):
    """(erase, write, log_decay) of a tile of tokens.

    gate, decay: beta's logit and log_g (0 in ungated modes). RAW needs none of this: it loads them.
    """
    beta = tl.sigmoid(gate)
    if mode == EFLA:
        a = beta * relative_exp(beta * lam)
        return a, a, decay
    elif mode == GATED_EFLA:
        log_decay = expm1(decay)
        g = 1.0 + log_decay
        x = g * beta * lam
        return g * beta * relative_exp(x), beta * relative_exp(x - log_decay), log_decay
    else:
        r2 = 1.0 / (lam + NORM_EPS)
        return beta * r2, beta * tl.sqrt(r2), decay


@triton.jit
def erase_over_write(mode: tl.constexpr, lam):
    """erase / write of EFLA and DELTANET, which does not depend on beta."""
    if mode == EFLA:
        return tl.full(lam.shape, 1.0, tl.float32)
    else:
        return 1.0 / tl.sqrt(lam + NORM_EPS)


@triton.jit
def coefficient_gradients(mode: tl.constexpr, gate, decay, lam, s_e, s_w, k_dk, d_log_decay):
    """(d logit, d log_g, dL/d lam) from s_e, s_w, k . dL/dk (at fixed coefficients) and dL/d log_decay.

    DELTANET: erase and write scale as r^2 and r, and scaling k against them changes nothing, so dL/d ln r = k . dL/dk;
    with the term -r^2 (k . dL/dk) k this is the usual projection of the gradient of a normalised key.
    """
    beta = tl.sigmoid(gate)
    one_minus_beta = tl.sigmoid(-gate)
    s = s_e + s_w
    if mode == EFLA:
        phi, psi = phi_psi(beta * lam)
        return s * phi * one_minus_beta, d_log_decay, s * psi * beta
    elif mode == GATED_EFLA:
        log_decay = expm1(decay)
        g = 1.0 + log_decay
        x = g * beta * lam
        eta = x - log_decay
        phi_x, psi_x = phi_psi(x)
        phi_eta, psi_eta = phi_psi(eta)
        # d ln w / d ln beta = 1 + x psi(eta), written as two terms of one sign
        d_ln_beta = s_e * phi_x + s_w * (phi_eta + log_decay * psi_eta)
        d_ln_g = s_e * phi_x + s_w * psi_eta * (x - g) + d_log_decay * g
        d_lam = g * beta * (s_e * psi_x + s_w * psi_eta)
        return d_ln_beta * one_minus_beta, d_ln_g, d_lam
    else:
        r2 = 1.0 / (lam + NORM_EPS)
        return s * one_minus_beta, d_log_decay, -0.5 * r2 * k_dk
