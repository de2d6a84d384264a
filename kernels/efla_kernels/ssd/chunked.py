"""State-space duality in chunks of C tokens, in PyTorch: the backend "torch".

With b_i the decay's logarithm summed from the chunk's start through token i, Gamma_ij = exp(b_i - b_j) for j <= i and
X = dt x, one chunk with state S before it is

    Y = exp(b) C S + (Gamma * C B^T) X      S' = exp(b_C) S + (exp(b_C - b) B)^T X

Everything is computed in fp32 (fp64 for fp64 inputs) and differentiated by autograd. One dense token is the
recurrence's own step.
"""

from __future__ import annotations

from torch import Tensor

from efla_kernels.argument_checks import compute_dtype
from efla_kernels.launch.chunks import CHUNK, ChunkGrid, chunk_decays, first_state
from efla_kernels.ssd import reference


def ssd(
    x: Tensor,
    dt: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """State-space duality chunk by chunk; arguments and results as `efla_kernels.ssd`.

    The G groups share B and C among R = H/G heads, so C B^T is formed once per group, and the R heads' states stand
    side by side as columns [N, R P] of one matrix.
    """
    batch, tokens, heads, width = x.shape
    groups, state_width = B.shape[2:]
    per_group = heads // groups
    dtype = compute_dtype(x, dt, log_decay, B, C, initial_state)
    if tokens == 0 or (tokens == 1 and cu_seqlens is None):
        return reference.ssd(
            x, dt, log_decay, B, C, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
    grid = ChunkGrid(batch, tokens, CHUNK, cu_seqlens, x.device)
    X, decay, B_, C_ = (grid.cut(t.to(dtype)) for t in (x * dt.unsqueeze(-1).to(dtype), log_decay, B, C))
    within, from_start = chunk_decays(decay)
    by_group = (groups, per_group)
    scores = (C_ @ B_.transpose(-1, -2)).unsqueeze(2) * within.unflatten(1, by_group)
    inside = scores.flatten(1, 2) @ X

    def columns(t: Tensor) -> Tensor:
        """[M, H, rows, P] -> [M, G, rows, R P]."""
        return t.unflatten(1, by_group).transpose(2, 3).flatten(3, 4)

    def heads_of(t: Tensor) -> Tensor:
        """[M, G, rows, R P] -> [M, H, rows, P]."""
        return t.unflatten(3, (per_group, width)).transpose(2, 3).flatten(1, 2)

    def step(state: Tensor, C: Tensor, keep: Tensor, written: Tensor) -> tuple[Tensor, Tensor]:
        return C @ state, state * keep + written

    written = B_.transpose(-1, -2) @ columns(X * within[..., -1:, :].transpose(-1, -2))
    keep = columns(from_start[..., -1, None, None].expand(-1, -1, 1, width))
    state = first_state(initial_state, (grid.sequences, heads, state_width, width), dtype, x.device)
    read, final = grid.scan(step, columns(state), C_, keep, written)
    out = inside + heads_of(read) * from_start.unsqueeze(-1)
    return grid.join(out).to(x.dtype), heads_of(final) if output_final_state else None
