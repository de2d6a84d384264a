"""What the last token reads, without a state: the weights m_t of o_T = S_T^T q_T = sum_t m_t v_t.

Reading S_t = d_t (I - e_t k_t k_t^T) S_{t-1} + w_t k_t v_t^T (S_0 = 0, d = exp(log_decay)) with one query from the
right end moves the query instead of the state:

    r_T = q_T,   c_t = k_t . r_t,   m_t = w_t c_t,   r_{t-1} = d_t (r_t - e_t c_t k_t)

K numbers move from token to token instead of K V, and the values are only needed as their weighted sum. A classifier of
whole sequences, which reads its last token alone, saves the factor. Exact, not an approximation; autograd goes through.

Chunk form (tokens 1..C, b_t the decay's logarithm summed through t, r_C' the query behind the chunk): the equations

    c_t + sum_{s>t} exp(b_s - b_t) (k_t . k_s) e_s c_s = exp(b_C - b_t) k_t . r_C'

are unitriangular, and r_0 = exp(b_C) r_C' - sum_s exp(b_s) e_s c_s k_s is the query of the chunk before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.argument_checks import expect_4d, expect_shape
from efla_kernels.backends import resolve_backend
from efla_kernels.delta_rule.ops import model_coefficients
from efla_kernels.launch.chunks import CHUNK

RULES = ("deltanet", "efla", "gated_deltanet", "gated_efla")


def last_weights(
    rule: str, q: Tensor, k: Tensor, beta_logit: Tensor, log_g: Tensor | None = None, *, backend: str = "auto"
) -> Tensor:
    """m [B, T, H] in fp32 (fp64 for fp64 inputs) with o_T = sum_t m_t v_t for any values v; the scale is 1.

    Args:
        rule: "deltanet", "efla", "gated_deltanet" or "gated_efla", whose op this is the last output of.
        q: the last token's query [B, H, K], L2-normalised here as the ops do it.
        k: keys [B, T, H, K], normalised here in the DeltaNets.
        beta_logit: [B, T, H]; log_g: [B, T, H] for the gated rules, else None.
        backend: "auto" (Triton on CUDA, else PyTorch), "torch" (chunks), "reference" (token by token) or "triton".

    Raises:
        ValueError: for anything that does not fit the above.
    """
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    if (log_g is not None) != rule.startswith("gated"):
        raise ValueError(f"{rule}: expected {'log_g' if log_g is None else 'no log_g'}")
    expect_4d("k", k, "[B, T, H, K]")
    B, T, H, K = k.shape
    if T == 0:
        raise ValueError("k: expected at least one token, got none")
    expect_shape("q", q, (B, H, K), "[B, H, K] with k's B, H, K")
    for name, gate in (("beta_logit", beta_logit), ("log_g", log_g)):
        if gate is not None:
            expect_shape(name, gate, (B, T, H), "[B, T, H]")
    name = resolve_backend(backend, k.device, rule)
    forms = {"torch": _chunked, "reference": _recurrence, "triton": _triton, "triton_recompute": _triton}
    if name not in forms:
        raise ValueError(f"last_weights: expected backend auto, {', '.join(forms)}, got {backend!r}")
    with torch.autocast(k.device.type, enabled=False):
        q, k, erase, write, log_decay = model_coefficients(rule, q, k, beta_logit, log_g)
        return write * forms[name](q, k, erase, log_decay)


def _recurrence(q: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor | None) -> Tensor:
    """c [B, T, H] by its definition; fp64-capable, differentiated by autograd."""
    r, found = q, []
    for t in reversed(range(k.shape[1])):
        c = (k[:, t] * r).sum(-1)
        found.append(c)
        r = r - (erase[:, t] * c).unsqueeze(-1) * k[:, t]
        if log_decay is not None:
            r = r * log_decay[:, t].exp().unsqueeze(-1)
    return torch.stack(found[::-1], 1)


def _chunked(q: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor | None) -> Tensor:
    """c [B, T, H] chunk by chunk, differentiated by autograd."""
    tokens = k.shape[1]
    padding = -tokens % CHUNK

    def cut(x: Tensor) -> Tensor:
        """[B, T, H, W] -> [N, B, H, C, W]; padded tokens (zeros) change nothing."""
        return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4)

    keys, e = cut(k), cut(erase.unsqueeze(-1))
    reads, writes, keep = keys, e * keys, None
    system = keys @ writes.transpose(-1, -2)
    if log_decay is not None:
        through = cut(log_decay.unsqueeze(-1)).cumsum(-2)
        # exp(b_s - b_t) for s > t; what is on and below the diagonal is not read, and must not overflow
        system = system * (through.transpose(-1, -2) - through).clamp(max=0.0).exp()
        end = through[..., -1:, :]
        reads, writes, keep = (end - through).exp() * keys, through.exp() * writes, end.exp().squeeze(-1)
    r, found = q, []
    # unbind, whose gradient is one stack; an index's would be a tensor of zeros per chunk
    parts = [system.unbind(), reads.unbind(), writes.unbind(), len(keys) * [None] if keep is None else keep.unbind()]
    for equations, read, write, kept in reversed(list(zip(*parts, strict=True))):
        c = torch.linalg.solve_triangular(equations, read @ r.unsqueeze(-1), upper=True, unitriangular=True)
        found.append(c.squeeze(-1))
        r = (r if kept is None else kept * r) - (write.transpose(-1, -2) @ c).squeeze(-1)
    return torch.stack(found[::-1], 1).permute(0, 1, 3, 2).flatten(1, 2)[:, :tokens]


def _triton(q: Tensor, k: Tensor, erase: Tensor, log_decay: Tensor | None) -> Tensor:
    from efla_kernels.delta_rule.last_token_kernel import last_coefficients  # triton exists where it is chosen

    return last_coefficients(q, k, erase, log_decay)
