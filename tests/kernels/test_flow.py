"""The rules against the differential equations that they solve, by matrix exponential and by quadrature, in float64.

EFLA:        dS/dt = -k k^T S + k v^T                               over a step of length beta
Gated EFLA:  dS/dt = -[(1 - g) I + g beta k k^T] S + beta k v^T     over a unit step

Both are dS/dt = -M S + F with M and F constant, so exp([[-M, F], [0, 0]]) holds the transition and the write.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import efla_kernels
import pytest
import scipy.linalg
import torch
from scipy.integrate import quad_vec
from torch import Tensor

from tests.kernels.cases import make_case

Exponential = Callable[[Tensor], Tensor]


def scipy_expm(matrix: Tensor) -> Tensor:
    return torch.from_numpy(scipy.linalg.expm(matrix.numpy()))


# torch's exponential is off by up to 2e-11 for norms near 0.03, SciPy's by some 1e-15
EXPONENTIALS = pytest.mark.parametrize(
    ("exponential", "bound"), [(torch.linalg.matrix_exp, 1e-10), (scipy_expm, 1e-12)], ids=["torch", "scipy"]
)


def flow(M: Tensor, F: Tensor, S: Tensor, length: float, exponential: Exponential) -> Tensor:
    """S(length) of dS/dt = -M S + F, S(0) = S."""
    width, values = F.shape
    generator = torch.zeros(width + values, width + values, dtype=S.dtype)
    generator[:width, :width], generator[:width, width:] = -M, F
    step = exponential(length * generator)
    return step[:width, :width] @ S + step[:width, width:]


def gated_generator(k: Tensor, beta: float, g: float) -> Tensor:
    """M of Gated EFLA."""
    return (1 - g) * torch.eye(k.numel(), dtype=k.dtype) + g * beta * torch.outer(k, k)


def run_flow(inputs: dict[str, Tensor], state: Tensor, exponential: Exponential) -> tuple[Tensor, Tensor]:
    """Outputs and final state of one sequence and head, token by token through the exact flow."""
    q, k, v, logit = (inputs[name][0, :, 0] for name in ("q", "k", "v", "beta_logit"))
    S, outputs = state[0, 0], []
    for t in range(q.shape[0]):
        beta, write = float(torch.sigmoid(logit[t])), torch.outer(k[t], v[t])
        if "log_g" in inputs:
            M = gated_generator(k[t], beta, math.exp(float(inputs["log_g"][0, t, 0])))
            S = flow(M, beta * write, S, 1.0, exponential)
        else:
            S = flow(torch.outer(k[t], k[t]), write, S, beta, exponential)
        outputs.append(q[t] / torch.sqrt(q[t] @ q[t] + 1e-6) @ S * k.shape[1] ** -0.5)
    return torch.stack(outputs), S


@EXPONENTIALS
@pytest.mark.parametrize("key_scale", [1e-6, 0.03, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("op", ["efla", "gated_efla"])
def test_ops_are_the_exact_flow(op: str, key_scale: float, exponential: Exponential, bound: float) -> None:
    case = make_case(op, 70, batch=1, heads=1, key_width=8, value_width=6, key_scale=key_scale, dtype=torch.float64)
    state = case.state.double()
    expected_o, expected = run_flow(case.inputs, state, exponential)
    for backend in ("reference", "torch"):
        o, final = getattr(efla_kernels, op)(
            **case.inputs, initial_state=state, output_final_state=True, backend=backend
        )
        assert (o[0, :, 0] - expected_o).norm() <= bound * expected_o.norm()
        assert (final[0, 0] - expected).norm() <= bound * expected.norm()


@EXPONENTIALS
@pytest.mark.parametrize("g", [1.0, 0.999999, 0.5, 1e-3, 1e-20, 0.0])
@pytest.mark.parametrize("lam", [1e-8, 0.1, 4.0, 200.0])
def test_gated_coefficients_are_those_of_the_flow(g: float, lam: float, exponential: Exponential, bound: float) -> None:
    """(e, w, log_decay) as read off one step of the flow with k along the first axis."""
    beta, k = 0.7, torch.tensor([math.sqrt(lam), 0.0], dtype=torch.float64)
    M, nothing = gated_generator(k, beta, g), torch.zeros(2, 1, dtype=torch.float64)
    kept = flow(M, nothing, nothing + 1, 1.0, exponential)[:, 0]
    written = flow(M, beta * k[:, None], nothing, 1.0, exponential)[0, 0]
    log_g = torch.tensor(g, dtype=torch.float64).log()
    e, w, log_decay = efla_kernels.gated_coefficients(torch.tensor(beta, dtype=torch.float64), k @ k, log_g)
    torch.testing.assert_close(torch.exp(log_decay), kept[1], rtol=bound, atol=0)
    torch.testing.assert_close(torch.exp(log_decay) * (1 - e * lam), kept[0], rtol=bound, atol=1e-15)
    torch.testing.assert_close(w * k[0], written, rtol=bound, atol=0)


@pytest.mark.parametrize("g", [1.0, 0.6, 0.0])
def test_gated_write_by_quadrature(g: float) -> None:
    """w k is the integral over the unit step of exp(-M (1 - s)) beta k, integrated numerically."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(4, generator=generator, dtype=torch.float64)
    beta, M = 0.8, gated_generator(k, 0.8, g)
    integral, _ = quad_vec(
        lambda s: (scipy_expm(-M * (1 - s)) @ k * beta).numpy(), 0.0, 1.0, epsabs=1e-13, epsrel=1e-13
    )
    log_g = torch.tensor(g, dtype=torch.float64).log()
    _, w, _ = efla_kernels.gated_coefficients(torch.tensor(beta, dtype=torch.float64), k @ k, log_g)
    torch.testing.assert_close(w * k, torch.from_numpy(integral), rtol=1e-12, atol=1e-13)


def test_the_flow_composes() -> None:
    """Two half steps with one key and value are the whole step; only the exact solution has that, Euler has not."""
    k = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)
    v = torch.tensor([1.0, -2.0], dtype=torch.float64)
    beta = {1: torch.tensor([0.6], dtype=torch.float64), 2: torch.tensor([0.3, 0.3], dtype=torch.float64)}

    def final_state(tokens: int, gate: Tensor) -> Tensor:
        keys, values = k.expand(1, tokens, 1, 3), v.expand(1, tokens, 1, 2)
        start, gate = torch.ones(1, 1, 3, 2), gate.view(1, tokens, 1)
        _, state = efla_kernels.delta_rule(keys, keys, values, gate, gate, initial_state=start, output_final_state=True)
        assert state is not None
        return state

    whole, halves = (final_state(n, efla_kernels.erase_write_efla(beta[n], k @ k)) for n in (1, 2))
    torch.testing.assert_close(halves, whole, rtol=1e-13, atol=1e-13)
    assert (final_state(2, beta[2]) - final_state(1, beta[1])).abs().max() > 1
