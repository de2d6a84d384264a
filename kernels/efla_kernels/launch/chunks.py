"""Cuts sequences, dense or packed, into chunks of C tokens that are computed together.

Legend: N sequences, M chunks of all sequences, C tokens per chunk. Chunks are laid out by their position in their
sequence (all first chunks, then all second ones, ...), and sequences with more chunks come first, so the chunks that
one step of the scan needs are one slice and the sequences still running are a prefix. The work is the number of
chunks, however unequal the sequences; an empty sequence has no chunk and keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from efla_kernels.argument_checks import segment_offsets

CHUNK = 64  # tokens


class ChunkGrid:
    """The chunks of B equal rows of T tokens, or of the segments of one packed row (`cu_seqlens`)."""

    def __init__(self, batch: int, tokens: int, chunk: int, cu_seqlens: Tensor | None, device: torch.device) -> None:
        self.batch, self.tokens = batch, tokens
        self.order: Tensor | None = None  # position in the grid -> sequence, where sequences were sorted
        if cu_seqlens is None:
            self.sequences, self.chunk = batch, min(chunk, max(tokens, 1))
            self.running = [batch] * -(-tokens // self.chunk)  # sequences still running at each step
            return
        offsets = torch.tensor(segment_offsets(cu_seqlens, tokens))
        lengths = offsets.diff()
        self.sequences, self.chunk = lengths.numel(), min(chunk, max(int(lengths.max()), 1))
        chunks = -(-lengths // self.chunk)
        order = torch.argsort(chunks, descending=True, stable=True)
        steps = torch.arange(int(chunks.max()))
        active = chunks[order] > steps[:, None]
        self.running = active.sum(1).tolist()
        step, position = active.nonzero(as_tuple=True)
        sequence = order[position]
        token = (offsets[sequence] + step * self.chunk)[:, None] + torch.arange(self.chunk)
        inside = token < offsets[sequence + 1][:, None]
        place = torch.empty(tokens, dtype=torch.long)
        place[token[inside]] = inside.flatten().nonzero().flatten()
        # slot -> token, where slots behind a segment's end read a row of zeros kept at index T; and token -> slot
        self.token_of_slot = torch.where(inside, token, tokens).flatten().to(device)
        self.slot_of_token = place.to(device)
        self.order = order.to(device)

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, H, ...] -> chunks [M, H, C, ...]; slots without a token hold zeros."""
        if self.order is None:
            missing = len(self.running) * self.chunk - self.tokens
            if missing:
                x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
            x = x.unflatten(1, (len(self.running), self.chunk)).movedim(0, 1).flatten(0, 1)
        else:
            x = F.pad(x[0], (0, 0) * (x.dim() - 2) + (0, 1)).index_select(0, self.token_of_slot)
            x = x.unflatten(0, (-1, self.chunk))
        return x.transpose(1, 2).contiguous()

    def join(self, y: Tensor) -> Tensor:
        """Chunks [M, H, C, ...] -> [B, T, H, ...], the inverse of `cut`."""
        y = y.transpose(1, 2)
        if self.order is None:
            y = y.unflatten(0, (-1, self.batch)).movedim(0, 1)
            return y.flatten(1, 2)[:, : self.tokens]
        return y.flatten(0, 1).index_select(0, self.slot_of_token).unsqueeze(0)

    def scan(
        self, step: Callable[..., tuple[Tensor, Tensor]], initial_state: Tensor, *chunks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Carry each sequence's state over its chunks: `step(state, *chunks of this step) -> (output, next state)`.

        initial_state [N, ...]; chunks [M, ...] each. Returns the outputs [M, ...] and the final states [N, ...].
        """
        state = initial_state if self.order is None else initial_state.index_select(0, self.order)
        outputs, finished = [], []
        # split, not slices: the backward of a slice writes a whole tensor of zeros at every step
        for rows in zip(*(x.split(self.running) for x in chunks), strict=True):
            running = rows[0].shape[0]
            if running < state.shape[0]:
                state, done = state.split([running, state.shape[0] - running])
                finished.append(done)
            output, state = step(state, *rows)
            outputs.append(output)
        final = torch.cat([state, *reversed(finished)]) if finished else state
        if self.order is not None:
            final = final.index_select(0, torch.argsort(self.order))
        return torch.cat(outputs), final


def chunk_decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """From log_decay [..., C]: Gamma [..., C, C] (0 above the diagonal) and exp(b) [..., C].

    Gamma's exponents are summed per column from the diagonal down, not taken as differences of one cumulative sum: a
    token that forgets everything (log_decay -1e4, or -inf) would leave no digits of the small decays behind it.
    """
    length = log_decay.shape[-1]
    below = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril(-1)
    exponent = torch.where(below, log_decay.unsqueeze(-1), 0.0).cumsum(-2)
    return exponent.masked_fill(below.transpose(0, 1), float("-inf")).exp(), log_decay.cumsum(-1).exp()


def first_state(
    initial_state: Tensor | None, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The initial state in `dtype`, zeros where there is none."""
    return torch.zeros(shape, dtype=dtype, device=device) if initial_state is None else initial_state.to(dtype)


def whole_sequences(
    x: Tensor,
    state_shape: tuple[int, int, int],
    dtype: torch.dtype,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[tuple[slice, int, int, Tensor]]:
    """(batch rows, first token, end token, initial state) of what runs together: the whole batch, or each segment."""
    batch, tokens = x.shape[:2]
    bounds = [0, tokens] if cu_seqlens is None else segment_offsets(cu_seqlens, tokens)
    sequences = batch if cu_seqlens is None else len(bounds) - 1
    states = first_state(initial_state, (sequences, *state_shape), dtype, x.device)
    per_run = batch if cu_seqlens is None else 1
    return [
        (slice(0, batch), first, last, states[n * per_run : (n + 1) * per_run])
        for n, (first, last) in enumerate(pairwise(bounds))
    ]
