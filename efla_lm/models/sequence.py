"""Which positions of a batch are tokens, padding, or parts of packed documents. Computed once per forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from efla_lm.models.cache import RecurrentCache
from efla_lm.models.rotary import rotary_tables


@dataclass(frozen=True)
class SequenceInfo:
    """Positions of a forward pass over [B, T] tokens, shared by all blocks.

    Attributes:
        mask: [B, T] bool, False on padding; None without padding.
        cu_seqlens: [N+1] int, document boundaries of a packed batch (B = 1); None otherwise.
        segments: [T] int64, document index of each token of a packed batch; None otherwise.
        past: number of positions in the cache.
        past_padding: [B] int64, how many of them are left padding; None for none.
        rotary: cos and sin of the positions, for attention only (`for_attention`).
        visible: which keys each query sees, for attention only (`visible_keys`).
    """

    batch: int
    length: int
    device: torch.device
    mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    segments: Tensor | None = None
    past: int = 0
    past_padding: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    visible: Tensor | None = None

    def for_attention(self, head_dim: int, theta: float) -> SequenceInfo:
        """The same with `rotary` and `visible`, which all attention blocks share."""
        return replace(self, rotary=rotary_tables(self.positions(), head_dim, theta), visible=self.visible_keys())

    def hide_padding(self, x: Tensor) -> Tensor:
        """x [B, T, ...] with zeros on padding."""
        if self.mask is None:
            return x
        return x * self.mask.view(*self.mask.shape, *[1] * (x.ndim - 2)).to(x.dtype)

    def positions(self) -> Tensor:
        """[B or 1, T] int64: index of each token in its sequence or document; padding does not count."""
        index = torch.arange(self.length, device=self.device)
        if self.cu_seqlens is not None:
            return (index - self.cu_seqlens.long()[self.segments])[None]
        if self.mask is None and self.past_padding is None:
            return (index + self.past)[None]
        local = index[None] if self.mask is None else (self.mask.long().cumsum(1) - 1).clamp(min=0)
        past = self.past if self.past_padding is None else (self.past - self.past_padding)[:, None]
        return local + past

    def visible_keys(self) -> Tensor | None:
        """Which of the past + T keys each of the T queries sees, bool [B or 1, 1, T, past + T].

        None: plain causal attention without a past, or a single query that sees all keys.
        """
        leading = self._leading_padding()
        if leading is None and self.cu_seqlens is None and (self.past == 0 or self.length == 1):
            return None
        query = self.past + torch.arange(self.length, device=self.device)[:, None]
        key = torch.arange(self.past + self.length, device=self.device)
        allowed = key <= query
        if self.segments is not None:
            allowed = allowed & (self.segments[:, None] == self.segments[None, :])
        allowed = allowed[None]
        if leading is not None:
            # A padding query sees itself: a softmax over no keys would be NaN. Its output is never used.
            allowed = (allowed & (key >= leading[:, None, None])) | (key == query)
        return allowed[:, None]

    def _leading_padding(self) -> Tensor | None:
        """[B] number of padding positions before the first token of each row, the past included."""
        if self.mask is None:
            return self.past_padding
        leading = self.mask.long().cumsum(1).eq(0).sum(1)
        if self.past_padding is None:
            # With a past that has no padding, or tokens first in every row, padding is on the right: the causal mask
            # hides it.
            return leading if self.past == 0 and bool(leading.any()) else None
        return self.past_padding + leading  # a row with tokens in the past has no padding on its left here


def describe(
    batch: int,
    length: int,
    device: torch.device,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: RecurrentCache | None,
) -> SequenceInfo:
    """Check mask and document boundaries against the tokens, and build the `SequenceInfo`.

    Args:
        attention_mask: 1 on tokens, 0 on padding; [B, T], or [B, past + T] with the cached positions. Entries beyond
            past + T belong to later tokens and are ignored.
        cu_seqlens: [N+1] offsets 0 ... T of the documents packed into one row.

    Raises:
        ValueError: shapes or boundaries do not fit; padding is between tokens, or in a packed batch. On a GPU, wrong
            values of the offsets fail a device-side assertion.
    """
    past = 0 if cache is None else cache.seen
    padding = None if cache is None else cache.padding
    mask = None if attention_mask is None else _current_mask(attention_mask, batch, length, past)
    if mask is not None and bool(mask.all()):
        mask = None
    if cu_seqlens is None:
        if mask is not None:
            _check_padding(mask)
        return SequenceInfo(batch, length, device, mask=mask, past=past, past_padding=padding)
    if mask is not None:
        raise ValueError("a packed batch (cu_seqlens) carries no padding; got an attention_mask with zeros")
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: expected batch size 1, got {batch}")
    if cache is not None:
        raise ValueError("cu_seqlens and a cache do not go together: packed documents start from empty states")
    segments = _segments(cu_seqlens, length, device)
    return SequenceInfo(batch, length, device, cu_seqlens=cu_seqlens, segments=segments)


def is_left_padded(info: SequenceInfo) -> bool:
    """Whether every row ends with a token, so that more tokens may follow: all padding is on the left."""
    if info.mask is None:
        return True
    begun = info.mask.long().cumsum(1) > 0
    if info.past and info.past_padding is None:
        return False
    if info.past_padding is not None:
        begun = begun | (info.past_padding < info.past)[:, None]
    return not bool((begun & ~info.mask).any())


def check_positions(position_ids: Tensor, info: SequenceInfo) -> None:
    """Raise ValueError unless position_ids [B or 1, T] rise by one along the tokens of each row.

    Recurrent models have no positions and rotary attention sees only their distances, so such positions change nothing.
    Others, as of documents packed into one row, would: `cu_seqlens` says where those begin.
    """
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, info.batch) or position_ids.shape[1] != info.length:
        raise ValueError(f"position_ids must be [{info.batch}, {info.length}], got {list(position_ids.shape)}")
    if info.length == 1 or info.cu_seqlens is not None:
        return
    wrong = position_ids.diff(dim=1) != 1
    if info.mask is not None:
        wrong = wrong & info.mask[:, 1:] & info.mask[:, :-1]
    if bool(wrong.any()):
        raise ValueError(
            "position_ids must rise by one along a row; give the boundaries of packed documents as cu_seqlens"
        )


def _current_mask(attention_mask: Tensor, batch: int, length: int, past: int) -> Tensor:
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch:
        raise ValueError(
            f"attention_mask must be [batch, tokens] with batch = {batch}, got {tuple(attention_mask.shape)}"
        )
    given = attention_mask.shape[1]
    if given >= past + length:
        return attention_mask[:, past : past + length].bool()
    if given == length:
        return attention_mask.bool()
    raise ValueError(
        f"attention_mask covers {given} positions; expected {length} (these tokens) or {past + length} "
        f"(with the {past} cached ones)"
    )


def _check_padding(mask: Tensor) -> None:
    starts = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    if bool((starts > 1).any()):
        row = int((starts > 1).nonzero()[0])
        raise ValueError(f"attention_mask row {row} has padding between tokens; padding must be on the left or right")


def _segments(cu_seqlens: Tensor, length: int, device: torch.device) -> Tensor:
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ValueError(f"cu_seqlens must be a vector of integer offsets, got {tuple(cu_seqlens.shape)}")
    offsets = cu_seqlens.to(device=device, dtype=torch.long)
    lengths = offsets.diff()
    fits = (offsets[0] == 0) & (offsets[-1] == length) & (lengths >= 0).all()
    if offsets.is_cuda:
        torch._assert_async(fits)  # a ValueError would make the host wait for the device in every forward pass
    elif not bool(fits):
        raise ValueError(f"cu_seqlens must rise from 0 to {length} (the tokens given), got {offsets.tolist()}")
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=device), lengths, output_size=length)
