"""Text to ids: those of the tokenizer without its template, several times as fast where that is provably the same.

Special tokens spelt out in the text (a literal `</s>`) are encoded as the characters they are, so that the only EOS
of a document is the one that `prepare` appends.

The quick way cuts a text into words and remembers the ids of each word. It is taken for two kinds of BPE:

* SentencePiece-style: " " becomes U+2581, one U+2581 is put in front, no pre-tokenizer, and no entry of the
  vocabulary holds U+2581 after another character. A merge across the place before a run of U+2581 would need such an
  entry, so the two sides never meet.
* GPT-2 style: byte-level with GPT-2's pattern, none of whose alternatives holds white space after a non-space; so it
  always cuts there itself.

Any other tokenizer gets whole documents. What is longer than LONGEST characters (a document on the slow way, a word
on the quick way) is cut, at white space if there is any, to bound memory: 130 bytes per character in the library.
The ids at such a cut may differ from those of the uncut text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from efla_data.errors import DataError
from efla_data.manifest import TokenizerInfo
from efla_data.token_file import token_dtype

LONGEST = 1 << 20  # characters given to the library at once
MEMO_WORDS = 1 << 18  # the memo is dropped when it holds so many words: about 50 MB
MEMO_LENGTH = 64  # longer words are not remembered
METASPACE = "\u2581"


class TextEncoder:
    """`encode(text)` -> ids of one document, BOS (by switch) and EOS included, in the dtype of the token file."""

    def __init__(self, backend: Tokenizer, info: TokenizerInfo, quick: bool = True) -> None:
        # A copy: the switch below belongs to this use of the tokenizer, not to the one that is kept.
        self.backend = Tokenizer.from_str(backend.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.info, self.dtype = info, token_dtype(info.vocab_size)
        self._before = np.array([info.bos_id] if info.add_bos else [], dtype=self.dtype)
        self._after = np.array([info.eos_id], dtype=self.dtype)
        self._memo = _Memo(self)
        style = word_style(self.backend) if quick else None
        self._words = {
            "metaspace": re.compile(f"[ {METASPACE}]+[^ {METASPACE}]*"),
            "gpt2": re.compile(r"\s*\S+|\s+"),
        }.get(style or "")
        self.style, self._skip = style, 1 if style == "metaspace" else 0
        self._refuse_literal_specials()

    def encode(self, text: str) -> np.ndarray:
        """Ids of one document. DataError should the text itself yield EOS."""
        if self._words is None:
            pieces = [self._call(piece) for piece in _cuts(text)]
        else:
            # A word of the SentencePiece style carries the space before it; the first has the normaliser's.
            words = self._words.findall(" " + text if self._skip and text else text)
            pieces = [np.frombuffer(b"".join(map(self._memo.__getitem__, words)), dtype=self.dtype)]
        ids = np.concatenate([self._before, *pieces, self._after])
        if np.count_nonzero(ids == self.info.eos_id) != 1:
            raise DataError(
                f"tokenizer {self.info.name} made EOS (id {self.info.eos_id}) out of text: {text[:80]!r}..."
            )
        return ids

    def word(self, word: str) -> bytes:
        """Ids of one word of the quick way, as bytes."""
        return b"".join(self._call(piece).tobytes() for piece in _cuts(word[self._skip :]))

    def _call(self, text: str) -> np.ndarray:
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, dtype=self.dtype)

    def _refuse_literal_specials(self) -> None:
        for special in (self.info.bos_id, self.info.eos_id):
            token = self.backend.id_to_token(special) if special is not None else None
            if token is not None and special in self._call(f"a {token} b"):
                raise DataError(
                    f"tokenizer {self.info.name}: {token!r} in a text becomes the special token itself; "
                    f'mark it "special": true in tokenizer.json'
                )


class _Memo(dict[str, bytes]):
    """word -> ids, computed when first asked for."""

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self._encoder = encoder

    def __missing__(self, word: str) -> bytes:
        ids = self._encoder.word(word)
        if len(word) <= MEMO_LENGTH:
            if len(self) >= MEMO_WORDS:
                self.clear()
            self[word] = ids
        return ids


def word_style(backend: Tokenizer) -> str | None:
    """ "metaspace" or "gpt2" where words can be encoded one by one (see the module), else None."""
    rules: dict[str, Any] = json.loads(backend.to_str())
    model = rules["model"]
    plain_bpe = (
        model["type"] == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        # added tokens that are not special are still looked for in the text, across words
        and all(token["special"] for token in rules["added_tokens"])
    )
    if not plain_bpe:
        return None
    normalizer, pre_tokenizer = rules["normalizer"], rules["pre_tokenizer"]
    if normalizer is None and pre_tokenizer is not None and pre_tokenizer["type"] == "ByteLevel":
        return "gpt2" if pre_tokenizer["use_regex"] and not pre_tokenizer["add_prefix_space"] else None
    steps = [
        {"type": "Prepend", "prepend": METASPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE},
    ]
    if pre_tokenizer is None and normalizer == {"type": "Sequence", "normalizers": steps}:
        across = re.compile(f"[^{METASPACE}]{METASPACE}")
        if METASPACE in model["vocab"] and not any(across.search(entry) for entry in model["vocab"]):
            return "metaspace"
    return None


def _cuts(text: str) -> Iterator[str]:
    """The text in stretches of at most LONGEST characters, cut before white space where there is some."""
    start = 0
    while len(text) - start > LONGEST:
        stop = start + LONGEST
        space = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
        stop = space if space > start else stop
        yield text[start:stop]
        start = stop
    if start < len(text) or not text:
        yield text[start:]
