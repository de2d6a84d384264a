"""Text to ids, as the tokenizer gives them without its template, several times as fast where that is provably equal.

A special token written in the text (a literal `</s>`) is encoded as characters, so that the only EOS of a document is
the one that `prepare` appends.

The quick way cuts a text into words and caches the ids of each word. Two kinds of BPE allow it:

* SentencePiece style: one U+2581 is put in front, " " becomes U+2581, nothing is cut before the merges. A merge across
  a place between two characters makes an entry of the vocabulary that holds them side by side. So if no entry holds
  U+2581 after another character, the two sides of the place before a run of U+2581 never meet; and if no entry holds a
  line feed (it is spelt as a byte), neither do the two sides of a line feed.
* GPT-2 style: byte-level with GPT-2's pattern, none of whose alternatives holds white space after a non-space; so it
  always cuts there itself.

Any other tokenizer gets whole documents. Stretches longer than LONGEST characters (of a document on the slow way, of a
word on the quick way) are cut, at white space if possible, to bound memory: the library takes 130 bytes per character.
The ids at such a cut may differ from those of the uncut text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from efla_data.corpus.manifest import TokenizerInfo
from efla_data.errors import DataError
from efla_data.loader.token_file import token_dtype

LONGEST = 1 << 20  # characters given to the library at once
MEMO_WORDS = 1 << 18  # words remembered in each of two generations: about 100 MB in all
MEMO_LENGTH = 64  # longer words are not remembered
METASPACE = "\u2581"


@dataclass(frozen=True)
class QuickWay:
    """How to encode word by word: put `prefix` in front of the text, find `words`, give each to `backend`."""

    prefix: str
    words: re.Pattern[str]
    backend: Tokenizer


class TextEncoder:
    """`encode(text)` -> ids of one document, BOS (by switch) and EOS included, in the dtype of the token file."""

    def __init__(self, backend: Tokenizer, info: TokenizerInfo, quick: bool = True) -> None:
        # A copy: the switches below must not reach the tokenizer that is saved.
        self.backend = _plain(backend.to_str())
        self.info, self.dtype = info, token_dtype(info.vocab_size)
        self._before = np.array([info.bos_id] if info.add_bos else [], dtype=self.dtype)
        self._after = np.array([info.eos_id], dtype=self.dtype)
        self.quick = quick_way(self.backend) if quick else None
        self._memo = _Memo(self.quick.backend, self.dtype) if self.quick is not None else None
        self._refuse_literal_specials()

    def encode(self, text: str) -> np.ndarray:
        """Ids of one document. DataError if the text itself yields EOS."""
        pieces: list[np.ndarray] = []
        if self.quick is None or self._memo is None:
            pieces = [_call(self.backend, piece, self.dtype) for piece in _cuts(text)]
        elif text:
            words = self.quick.words.findall(self.quick.prefix + text)
            pieces = [np.frombuffer(b"".join(map(self._memo.__getitem__, words)), dtype=self.dtype)]
        ids = np.concatenate([self._before, *pieces, self._after])
        if np.count_nonzero(ids == self.info.eos_id) != 1:
            raise DataError(
                f"tokenizer {self.info.name} made EOS (id {self.info.eos_id}) out of text: {text[:80]!r}..."
            )
        return ids

    def _refuse_literal_specials(self) -> None:
        for special in (self.info.bos_id, self.info.eos_id):
            token = self.backend.id_to_token(special) if special is not None else None
            if token is not None and special in _call(self.backend, f"a {token} b", self.dtype):
                raise DataError(
                    f"tokenizer {self.info.name}: {token!r} in a text becomes the special token itself; "
                    f'mark it "special": true in tokenizer.json'
                )


class _Memo(dict[str, bytes]):
    """word -> ids, computed on first use. When full, it becomes the old generation; reused words return."""

    def __init__(self, backend: Tokenizer, dtype: np.dtype) -> None:
        super().__init__()
        self._backend, self._dtype = backend, dtype
        self._old: dict[str, bytes] = {}

    def __missing__(self, word: str) -> bytes:
        ids = self._old.get(word)
        if ids is None:
            ids = b"".join(_call(self._backend, piece, self._dtype).tobytes() for piece in _cuts(word))
        if len(word) <= MEMO_LENGTH:
            if len(self) >= MEMO_WORDS:
                self._old = dict(self)
                self.clear()
            self[word] = ids
        return ids


def _plain(rules: str) -> Tokenizer:
    backend = Tokenizer.from_str(rules)
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend


def _call(backend: Tokenizer, text: str, dtype: np.dtype) -> np.ndarray:
    return np.array(backend.encode(text, add_special_tokens=False).ids, dtype=dtype)


def quick_way(backend: Tokenizer) -> QuickWay | None:
    """How to encode word by word with the ids of the whole text (see the module); None if that is not proven."""
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
        if pre_tokenizer["use_regex"] and not pre_tokenizer["add_prefix_space"]:
            return QuickWay("", re.compile(r"\s*\S+|\s+"), backend)
        return None
    steps = [
        {"type": "Prepend", "prepend": METASPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": METASPACE},
    ]
    style = pre_tokenizer is None and normalizer == {"type": "Sequence", "normalizers": steps}
    if style and not model.get("ignore_merges"):  # else an entry equal to a whole word would be used as it is
        vocabulary = model["vocab"]
        if METASPACE not in vocabulary or any(re.search(f"[^{METASPACE}]{METASPACE}", entry) for entry in vocabulary):
            return None
        feed = "\n" if _spells_line_feed(model) else ""
        words = re.compile(
            f"[ {METASPACE}]+[^ {METASPACE}{feed}]*|[^ {METASPACE}{feed}]+" + (f"|{feed}+" if feed else "")
        )
        return QuickWay(" ", words, _plain(json.dumps({**rules, "normalizer": steps[1]})))  # the prefix is ours
    return None


def _spells_line_feed(model: dict[str, Any]) -> bool:
    """Whether a line feed always becomes the token of its byte, which no merge uses."""
    spelt = "<0x0A>"
    inside = any("\n" in entry or (spelt in entry and entry != spelt) for entry in model["vocab"])
    return bool(model.get("byte_fallback")) and spelt in model["vocab"] and not inside


def _cuts(text: str) -> Iterator[str]:
    """The text in stretches of at most LONGEST characters, cut before white space if possible."""
    start = 0
    while len(text) - start > LONGEST:
        stop = start + LONGEST
        space = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
        stop = space if space > start else stop
        yield text[start:stop]
        start = stop
    if start < len(text) or not text:
        yield text[start:]
