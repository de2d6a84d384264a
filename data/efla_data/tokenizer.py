"""Find, train and keep a tokenizer. What is kept is the very `tokenizer.json` that made the ids.

A kept tokenizer is a folder of `tokenizer.json` and `tokenizer_config.json` that `AutoTokenizer.from_pretrained`
loads as a plain fast tokenizer. The class that the source names is left behind on purpose: some classes rebuild
their own rules on loading and give other ids than the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from efla_data.errors import DataError
from efla_data.manifest import TokenizerInfo

BOS, EOS = "<s>", "</s>"  # of tokenizers trained here
# Tried in this order when a tokenizer does not say which of its tokens ends a document.
USUAL_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]")
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer without truncation and padding, and the names of its special tokens (only those it has)."""

    name: str
    backend: Tokenizer
    special: dict[str, str]


def find_tokenizer(name: str) -> LoadedTokenizer:
    """Load from a folder with `tokenizer.json`, from such a file, or from the hub. DataError when there is none."""
    path = Path(name).expanduser()
    if path.is_file():
        return _load(name, path, path.parent)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise DataError(
                f"data.tokenizer: {path} holds no tokenizer.json; convert a SentencePiece tokenizer to a fast one"
            )
        return _load(name, path / "tokenizer.json", path)
    if path.is_absolute() or name.startswith("."):
        raise DataError(f"data.tokenizer: {path} does not exist")
    import huggingface_hub

    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=["tokenizer.json", *CONFIG_FILES]))
    except Exception as error:  # whatever the network or the hub says, the user needs it with the key beside it
        what = "neither a folder, nor a file, nor to be had from the hub"
        raise DataError(f"data.tokenizer: {name} is {what}: {error}") from error
    if not (folder / "tokenizer.json").is_file():
        raise DataError(f"data.tokenizer: hub repository {name} holds no tokenizer.json (a fast tokenizer)")
    return _load(name, folder / "tokenizer.json", folder)


def _load(name: str, file: Path, folder: Path) -> LoadedTokenizer:
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file that it cannot parse
        raise DataError(f"data.tokenizer: {file} is no tokenizer.json ({error})") from error
    backend.no_truncation()
    backend.no_padding()
    special = _special_tokens(folder, backend)
    if "eos_token" not in special:
        raise DataError(
            f"data.tokenizer: {file} names no eos_token, and has none of {', '.join(USUAL_EOS)}: "
            f"every document must end in EOS; name it in {folder / 'tokenizer_config.json'}"
        )
    return LoadedTokenizer(name, backend, special)


def _special_tokens(folder: Path, backend: Tokenizer) -> dict[str, str]:
    special: dict[str, str] = {}
    for name in reversed(CONFIG_FILES):  # the first named wins
        if (folder / name).is_file():
            try:
                config = json.loads((folder / name).read_text(encoding="utf-8"))
            except ValueError as error:
                raise DataError(f"data.tokenizer: {folder / name} is damaged ({error})") from error
            for key in SPECIAL_NAMES:
                token = config.get(key)
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str) and backend.token_to_id(token) is not None:
                    special[key] = token
    if "eos_token" not in special:
        usual = [token for token in USUAL_EOS if backend.token_to_id(token) is not None]
        special.update({"eos_token": usual[0]} if usual else {})
    return special


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> LoadedTokenizer:
    """A byte-level BPE of at most `vocab_size` entries, ids 0 and 1 being BOS and EOS. Equal texts give equal merges.

    A text with few distinct words yields fewer entries.
    """
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte, so that no text is unknown
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return LoadedTokenizer("train", backend, {"bos_token": BOS, "eos_token": EOS})


def save_tokenizer(tokenizer: LoadedTokenizer, folder: Path) -> None:
    """Keep a tokenizer for training exports and evaluation."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    temporary = folder / "tokenizer.json.tmp"
    temporary.write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
    os.replace(temporary, folder / "tokenizer.json")


def tokenizer_sha256(tokenizer: LoadedTokenizer) -> str:
    """Hash of the `tokenizer.json` that `save_tokenizer` writes."""
    return hashlib.sha256(tokenizer.backend.to_str(pretty=True).encode()).hexdigest()


def describe_tokenizer(tokenizer: LoadedTokenizer, add_bos: bool) -> TokenizerInfo:
    """What the manifest says of a tokenizer. DataError when BOS is asked for and there is none."""
    backend, special = tokenizer.backend, tokenizer.special
    if add_bos and "bos_token" not in special:
        raise DataError(f"data.bos=true, but tokenizer {tokenizer.name} has no bos_token: set data.bos=false")
    bos = special.get("bos_token")
    eos_id = backend.token_to_id(special["eos_token"])
    assert eos_id is not None  # only names that the vocabulary has are kept
    return TokenizerInfo(
        name=tokenizer.name,
        sha256=tokenizer_sha256(tokenizer),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=backend.token_to_id(bos) if bos is not None else None,
        eos_id=eos_id,
        add_bos=add_bos,
    )
