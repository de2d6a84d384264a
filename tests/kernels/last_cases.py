"""`last_weights` against the whole op: the last output and all gradients, the op's recurrence in fp64 as truth."""

from __future__ import annotations

import efla_kernels
import torch
from efla_kernels.delta_rule.last_token import last_weights
from torch import Tensor


def inputs(rule: str, tokens: int, device: str = "cpu") -> list[Tensor]:
    """q, k, v, beta_logit (and log_g, with one token that forgets nearly all), fp32; 2 sequences, 2 heads of 16."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, tokens, 2)
    made = [torch.randn(*shape, width, generator=generator) for width in (16, 16, 8)]
    made.append(torch.randn(shape, generator=generator))
    if rule.startswith("gated"):
        log_g = -torch.rand(shape, generator=generator)
        log_g[0, tokens // 2] = -60.0
        made.append(log_g)
    return [x.to(device) for x in made]


def worst_error(rule: str, tokens: int, dtype: torch.dtype, backend: str, device: str = "cpu") -> float:
    """Largest relative error among o_T and the gradients of q_T, k, v and the gates."""
    given = inputs(rule, tokens, device)

    def whole(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return getattr(efla_kernels, rule)(q, k, v, *gates, scale=1.0, backend="reference")[0][:, -1]

    def last(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return torch.einsum("bth,bthv->bhv", last_weights(rule, q[:, -1], k, *gates, backend=backend), v)

    found = []
    for form, kind in ((whole, torch.float64), (last, dtype)):
        leaves = [x.to(kind, copy=True).requires_grad_() for x in given]
        o = form(*leaves)
        (o * torch.arange(1, 9, dtype=kind, device=device)).sum().backward()
        found.append([o.detach(), *(x.grad for x in leaves if x.grad is not None)])
    truth, ours = found
    assert len(truth) == len(ours) == len(given) + 1
    return max(float((x.double() - t).norm() / t.norm().clamp(min=1e-12)) for x, t in zip(ours, truth))
