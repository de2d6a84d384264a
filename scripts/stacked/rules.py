"""The recurrent mixers of M models at once, on the ops of `efla_kernels`: the models are laid along the batch."""

from __future__ import annotations

import efla_kernels
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from efla_lm.models.layers import draw_A_log, draw_dt_bias
from efla_lm.models.rules import RULES
from scripts.stacked.modules import Draw, StackedLinear, StackedModule

RECURRENT_MIXERS = tuple(name for name, rule in RULES.items() if rule.op == name)


def draw_A(low: float, high: float) -> Draw:
    """How A_log is drawn, with A = exp(A_log) uniform over (low, high]."""
    return lambda shape, generator: draw_A_log(torch.Size(shape), low, high, generator)


def draw_dt(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """How dt_bias is drawn, as in Mamba-2 and Gated DeltaNet."""
    return draw_dt_bias(torch.Size(shape), generator)


class StackedGates(StackedModule):
    """beta's logit, and log g = -exp(A_log) softplus(W_a x + dt_bias) for the gated rules; both [M, B, T, H]."""

    def __init__(self, mixer: str, models: int, hidden: int, heads: int, beta: StackedLinear) -> None:
        super().__init__()
        self.beta = beta
        self.a_proj: StackedLinear | None = None
        if RULES[mixer].gated:
            self.a_proj = StackedLinear(models, hidden, heads, bias=False)
            self.A_log = self.add("A_log", models, (heads,), draw_A(0.0, 16.0))
            self.dt_bias = self.add("dt_bias", models, (heads,), draw_dt)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [M, B, T, hidden] -> [beta_logit] or [beta_logit, log_g]."""
        gates = [self.beta(x)]
        if self.a_proj is not None:
            step = F.softplus(self.a_proj(x) + self.dt_bias[:, None, None])
            gates.append(-self.A_log.exp()[:, None, None] * step)
        return gates


def run_rule(
    mixer: str, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], *, backend: str, scale: float | None = None
) -> Tensor:
    """A delta rule over [M, B, T, H, K]; returns o [M, B, T, H, V]."""
    models = q.shape[0]
    rows = (x.flatten(0, 1) for x in (q, k, v, *gates))
    o, _ = getattr(efla_kernels, mixer)(*rows, scale=scale, backend=backend)
    return o.unflatten(0, (models, -1))


def read_last(mixer: str, q: Tensor, k: Tensor, v: Tensor, gates: list[Tensor], *, backend: str) -> Tensor:
    """The output of the last token alone, o_T = S_T^T q_T / |q_T| = sum_t m_t v_t.

    q [M, B, H, K], k [M, B, T, H, K] and v [M, B, T, H, V] -> [M, B, H, V]. It is linear in v: the caller may pass the
    input of the value projection and project the result.
    """
    rows = [x.flatten(0, 1) for x in (q, k, *gates)]
    m = efla_kernels.last_weights(mixer, *rows, backend=backend).unflatten(0, k.shape[:2])
    return (m.transpose(2, 3).unsqueeze(-2) @ v.transpose(2, 3)).squeeze(-2)


class StackedSsd(StackedModule):
    """Mamba-2's core per model: dt = softplus(raw + dt_bias), decay exp(-exp(A_log) dt), y = S^T C + D x."""

    def __init__(self, models: int, heads: int) -> None:
        super().__init__()
        self.A_log = self.add("A_log", models, (heads,), draw_A(1.0, 16.0))
        self.dt_bias = self.add("dt_bias", models, (heads,), draw_dt)
        self.D = self.add("D", models, (heads,), lambda shape, generator: torch.ones(shape))

    def forward(self, x: Tensor, raw_dt: Tensor, B: Tensor, C: Tensor, backend: str) -> Tensor:
        """x [M, B, T, H, P], raw_dt [M, B, T, H], B and C [M, B, T, G, N] -> y as x."""
        y, _ = efla_kernels.ssd(*self._rows(x, raw_dt, B, C), backend=backend)
        return y.unflatten(0, x.shape[:2]) + self.D[:, None, None, :, None] * x

    def read_last(self, x: Tensor, raw_dt: Tensor, B: Tensor, C: Tensor, backend: str) -> Tensor:
        """The last token's y [M, B, H, P] alone; C [M, B, H, N] of that token, one group per head."""
        _, state = efla_kernels.ssd(*self._rows(x, raw_dt, B, B), output_final_state=True, backend=backend)
        assert state is not None
        y = C.unsqueeze(-2) @ state.unflatten(0, x.shape[:2]).to(C.dtype)
        return y.squeeze(-2) + self.D[:, None, :, None] * x[:, :, -1]

    def _rows(self, x: Tensor, raw_dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, ...]:
        dt = F.softplus(raw_dt + self.dt_bias[:, None, None])
        log_decay = -self.A_log.exp()[:, None, None] * dt
        return tuple(t.flatten(0, 1) for t in (x, dt, log_decay, B, C))
