"""The state that a forward pass hands to the next one over the same sequences."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers.cache_utils import Cache


@dataclass
class LayerState:
    """State of one block. A recurrent mixer fills `conv` and `state`, attention fills `keys` and `values`.

    Attributes:
        conv: last W-1 inputs of the short convolution, [B, W-1, D].
        state: recurrent state S, fp32 [B, H, K, V] (Mamba-2: [B, H, N, P]).
        keys, values: [B, H, S, K] of the S tokens seen, keys already rotated.
    """

    conv: Tensor | None = None
    state: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    # transformers reads these from each layer of a cache
    is_croppable = False
    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def select(self, rows: Tensor) -> None:
        """Keep (or repeat) the given rows of the batch."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                setattr(self, field.name, value.index_select(0, rows.to(value.device)))

    def clear(self) -> None:
        self.conv = self.state = self.keys = self.values = None


class RecurrentCache(Cache):
    """Cache of every model of the family: constant size for recurrent mixers, keys and values for attention.

    `generate` gets it from the first forward pass and passes it to the next. All padding is on the left, so one number
    per row is the mask of the tokens seen.

    Attributes:
        seen: number of positions seen, padding included.
        padding: [B] int64, how many of them were left padding; None when no row had any.
    """

    layers: list[LayerState]  # type: ignore[assignment]

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[LayerState() for _ in range(num_layers)])  # type: ignore[misc]
        self.seen = 0
        self.padding: Tensor | None = None

    def advance(self, tokens: int, mask: Tensor | None) -> None:
        """Count `tokens` more positions; `mask` [B, tokens] is False on padding (None: no padding)."""
        if mask is not None:
            padding = (~mask).sum(1)
            self.padding = padding if self.padding is None else self.padding + padding
        self.seen += tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions seen, padding included."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    @property
    def is_linear(self) -> list[bool]:
        # To transformers, "not linear" means that the cache counts its tokens, as this one does.
        return [False] * len(self.layers)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.seen > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward pass."""
        layer = self.layers[0]
        held = layer.state if layer.state is not None else layer.keys
        return -1 if held is None else held.shape[0]

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.select(indices)
        if self.padding is not None:
            self.padding = self.padding.index_select(0, indices.to(self.padding.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i continues row beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        for layer in self.layers:
            layer.clear()
        self.seen, self.padding = 0, None

    def crop(self, tokens_to_remove: int) -> None:
        """A recurrent state cannot forget: only crop(0) is possible.

        Raises:
            ValueError: for any other number.
        """
        if tokens_to_remove:
            raise ValueError(
                f"a recurrent state cannot be rolled back by {tokens_to_remove} tokens; copy.deepcopy the cache before "
                "tokens that may be undone"
            )
