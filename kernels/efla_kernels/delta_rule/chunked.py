"""The delta rule in chunks of C tokens, in PyTorch: the backend "torch".

The derivation is in README.md. With b_i the decay's logarithm summed from the chunk's start through token i and
Gamma_ij = exp(b_i - b_j) for j <= i, one chunk with state S before it is

    A = strictly lower part of (e_i Gamma_ij k_i.k_j)      X = (I + A)^{-1} (w V - e exp(b) K S) = U - W S
    O = scale [exp(b) Q S + (Gamma * Q K^T) X]              S' = exp(b_C) S + (exp(b_C - b) K)^T X

Everything is computed in fp32 (fp64 for fp64 inputs) and differentiated by autograd, which keeps some 12 matrices of
C x K or C x C per chunk and head, 18 with decay. One dense token is the recurrence's own step: that is the chunk form
at C = 1, and what decoding calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from efla_kernels.argument_checks import compute_dtype
from efla_kernels.delta_rule import reference
from efla_kernels.launch.chunks import CHUNK, ChunkGrid, chunk_decays, first_state


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor, log_decay: Tensor | None, *, scale: float,
    initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The delta rule chunk by chunk; arguments and results as `efla_kernels.delta_rule`."""
    batch, tokens, heads, key_width = q.shape
    dtype = compute_dtype(q, k, v, erase, write, log_decay, initial_state)
    if tokens == 0 or (tokens == 1 and cu_seqlens is None):
        return reference.delta_rule(
            q, k, v, erase, write, log_decay, scale=scale, initial_state=initial_state,
            output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        )  # fmt: skip
    grid = ChunkGrid(batch, tokens, CHUNK, cu_seqlens, q.device)
    Q, K, V, e, w = (grid.cut(x.to(dtype)) for x in (q, k, v, erase.unsqueeze(-1), write.unsqueeze(-1)))
    Q = Q * scale
    K_t = K.transpose(-1, -2)
    A, P = e * (K @ K_t), (Q @ K_t)
    erase_rows, read_rows, write_rows, keep = e * K, Q, K_t, None
    if log_decay is None:
        P = P.tril()
    else:
        within, from_start = chunk_decays(grid.cut(log_decay.to(dtype)))
        A, P = A * within, P * within
        erase_rows, read_rows = erase_rows * from_start.unsqueeze(-1), Q * from_start.unsqueeze(-1)
        write_rows = K_t * within[..., -1:, :]
        keep = from_start[..., -1, None, None]
    # unitriangular: reads only what is strictly below the diagonal. Substitution is stable row by row whatever the
    # norms of the keys, because a key's norm scales a row and a column of A alone.
    solution = torch.linalg.solve_triangular(A, torch.cat([w * V, erase_rows], -1), upper=False, unitriangular=True)
    U, W = solution.split([v.shape[-1], key_width], -1)

    def step(
        state: Tensor, U: Tensor, W: Tensor, P: Tensor, read_rows: Tensor, write_rows: Tensor, *keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        X = U - W @ state
        carried = state * keep[0] if keep else state
        return read_rows @ state + P @ X, carried + write_rows @ X

    chunks = (U, W, P, read_rows, write_rows, *(() if keep is None else (keep,)))
    state = first_state(initial_state, (grid.sequences, heads, key_width, v.shape[-1]), dtype, q.device)
    out, final = grid.scan(step, state, *chunks)
    return grid.join(out).to(v.dtype), final if output_final_state else None
