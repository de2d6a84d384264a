"""Continue a text, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from efla_lm.errors import UserError
from efla_lm.evaluation.tokens import TokenPolicy


class TextPieces(BaseStreamer):
    """Passes on new text once it is final: a character may take several tokens, and the space before a word may show
    only if the token before it is decoded too."""

    OVERLAP = 4  # tokens before the new ones that are decoded with them

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.ids: list[int] = []
        self.shown = 0  # tokens whose text was passed on; the prompt counts as shown

    def put(self, value: torch.Tensor) -> None:
        is_prompt = not self.ids
        self.ids.extend(value.flatten().tolist())
        if is_prompt:
            self.shown = len(self.ids)
        else:
            self._show(final=False)

    def end(self) -> None:
        self._show(final=True)

    def _show(self, final: bool) -> None:
        start = max(0, self.shown - self.OVERLAP)
        before, now = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in
                       (self.ids[start : self.shown], self.ids[start:]))  # fmt: skip
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not final:
            return
        self.shown = len(self.ids)
        if len(now) > len(before):
            self.on_text(now[len(before) :])


@torch.no_grad()
def complete(
    model: Any,
    policy: TokenPolicy,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
    on_text: Callable[[str], None] = lambda text: None,
) -> int:
    """Continue `prompt`, pass each piece of text to `on_text`, and return the number of new tokens.

    temperature 0 takes the most probable token each time; above 0 it samples, from the `top_k` most probable tokens
    (None: all) and of those from the smallest set that holds the probability `top_p`. EOS ends the text early.

    Raises:
        UserError: a value out of range.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens}: expected at least 1")
    if temperature < 0:
        raise UserError(f"temperature={temperature}: expected 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: expected a probability above 0")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k}: expected at least 1, or null for all tokens")
    ids = policy.contexts([prompt])[0] or [policy.prefix_id]
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # 0 turns transformers' top_k off, whose own default is 50
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k or 0}
    torch.manual_seed(seed)
    input_ids = torch.tensor([ids], device=next(model.parameters()).device)
    out = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        eos_token_id=policy.eos_id,
        pad_token_id=policy.eos_id,
        streamer=TextPieces(policy.tokenizer, on_text),
        **sampling,
    )
    return int(out.shape[1]) - len(ids)
