"""Text to token ids for evaluation, with at most one start token.

Two choices: `bos` says whether a text opens with BOS. `prefix` is the token before a text without context, whose first
token could not be scored otherwise (rolling perplexity, empty contexts). With `auto` for both, ids equal those of
lm-eval's stock `hf` model with one exception: if a tokenizer adds BOS itself, the stock model sends BOS twice in
rolling tasks, and we send it once.

The tokenizers of our runs and exports say what training did. With data.bos=false they neither add nor name a BOS:
`auto` is no BOS, and the prefix is EOS, the token before each document of the training stream. With data.bos=true both
are BOS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from efla_lm.errors import UserError

BOS_CHOICES = ("auto", "always", "never")
PREFIX_CHOICES = ("auto", "bos", "eos")


class TokenPolicy:
    """Encoder of contexts and continuations with a stated start token.

    Args:
        tokenizer: a Hugging Face tokenizer.
        bos: `auto` = contexts open with BOS if the tokenizer's own call does so; `always`; `never`.
        prefix: the token before a text without context: `auto` = BOS if the tokenizer has one, else EOS; `bos`; `eos`.

    Raises:
        UserError: the tokenizer lacks a token that was asked for.
    """

    def __init__(self, tokenizer: Any, bos: str = "auto", prefix: str = "auto") -> None:
        if bos not in BOS_CHOICES:
            raise UserError(f"bos={bos}: expected one of {', '.join(BOS_CHOICES)}")
        if prefix not in PREFIX_CHOICES:
            raise UserError(f"prefix={prefix}: expected one of {', '.join(PREFIX_CHOICES)}")
        self.tokenizer = tokenizer
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.bos_choice = bos
        self.tokenizer_adds_bos = self._tokenizer_adds_bos()
        self.prepend_bos = bos == "always" or (bos == "auto" and self.tokenizer_adds_bos)
        if self.prepend_bos and self.bos_id is None:
            raise UserError("bos=always: the tokenizer has no BOS token; use bos=never or prefix=eos")
        self.prefix_id = self._prefix(prefix)

    def _tokenizer_adds_bos(self) -> bool:
        if self.bos_id is None:
            return False
        own_call = self.tokenizer("a")["input_ids"]
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        return own_call[:1] == [self.bos_id] and bare[:1] != [self.bos_id]

    def _prefix(self, choice: str) -> int:
        wanted = {"bos": self.bos_id, "eos": self.eos_id, "auto": self.eos_id if self.bos_id is None else self.bos_id}
        token = wanted[choice]
        if token is None:
            name = "neither a BOS nor an EOS token" if choice == "auto" else f"no {choice.upper()} token"
            raise UserError(f"prefix={choice}: the tokenizer has {name}, so the first token of a text cannot be scored")
        return token

    def describe(self) -> dict[str, Any]:
        """The choice as the result file shows it."""
        return {
            "bos": self.bos_choice,
            "contexts_open_with_bos": self.prepend_bos,
            "tokenizer_adds_bos": self.tokenizer_adds_bos,
            "bos_token_id": self.bos_id,
            "prefix_token_id": self.prefix_id,
            "prefix_token": self.tokenizer.decode([self.prefix_id]),
        }

    def plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids without any special token that the tokenizer would add."""
        if not texts:
            return []
        return [list(ids) for ids in self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]

    def contexts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that start a sequence, with BOS in front if so configured."""
        encoded = self.plain(texts)
        if not self.prepend_bos:
            return encoded
        assert self.bos_id is not None
        return [ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids] for ids in encoded]

    def rolling(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """(prefix, text) per text, for the likelihood of the whole text; the start token is not scored."""
        return [([self.prefix_id], ids[1:] if ids[:1] == [self.prefix_id] else ids) for ids in self.plain(texts)]

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        """(context ids, continuation ids) per (context, continuation), cut as lm-eval cuts them.

        Trailing spaces of the context go to the continuation, then the whole is encoded and cut after as many tokens
        as the context alone has. An empty context becomes the prefix token. Only an empty continuation gives an empty
        part.
        """
        moved = [_move_trailing_space(context, continuation) for context, continuation in pairs]
        texts = list(dict.fromkeys(text for c, x in moved for text in (c, c + x)))
        encoded = dict(zip(texts, self.contexts(texts)))
        bare_texts = list(dict.fromkeys(continuation for context, continuation in moved if context == ""))
        bare = dict(zip(bare_texts, self.plain(bare_texts)))
        return [
            self._without_context(bare[continuation])
            if context == ""
            else self._cut(encoded[context], encoded[context + continuation])
            for context, continuation in moved
        ]

    def _without_context(self, continuation: list[int]) -> tuple[list[int], list[int]]:
        if continuation[:1] == [self.prefix_id] and len(continuation) > 1:
            return continuation[:1], continuation[1:]
        return [self.prefix_id], continuation

    def _cut(self, context: list[int], whole: list[int]) -> tuple[list[int], list[int]]:
        cut = len(context)
        if cut >= len(whole):  # the continuation merged into the context's last token: score from the first difference
            cut = next((i for i, (a, b) in enumerate(zip(context, whole)) if a != b), max(len(whole) - 1, 0))
        if cut == 0:
            return [self.prefix_id], whole
        return whole[:cut], whole[cut:]


def _move_trailing_space(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation
