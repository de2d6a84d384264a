"""Load, train and save a tokenizer. The saved copy gives the ids that training saw, the start token included.

A saved tokenizer is a folder of `tokenizer.json` and `tokenizer_config.json` that `AutoTokenizer.from_pretrained` loads
as a plain fast tokenizer. It does not keep the class that the source names: some classes rebuild their rules on loading
and give other ids than the file. Nor does it keep the source's template of special tokens: it puts BOS before a text if
training did (`data.bos=true`), and otherwise neither adds nor names BOS, so that lm-eval and generate start a text with
EOS, which precedes every document of training.
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

from efla_data.corpus.manifest import TokenizerInfo
from efla_data.errors import DataError

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
    except Exception as error:  # whatever the network or the hub reports, named with its key
        what = "neither a folder, nor a file, nor on the hub"
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


def save_tokenizer(tokenizer: LoadedTokenizer, folder: Path, add_bos: bool) -> None:
    """Save a tokenizer for exports and evaluation. Calling it puts BOS first if `add_bos`, else nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    special = {name: token for name, token in tokenizer.special.items() if add_bos or name != "bos_token"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    temporary = folder / "tokenizer.json.tmp"
    rules: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    rules["post_processor"] = _start_rule(rules["post_processor"], tokenizer, add_bos)
    temporary.write_text(json.dumps(rules, indent=2, ensure_ascii=False), encoding="utf-8")
    os.replace(temporary, folder / "tokenizer.json")


def _start_rule(given: dict[str, Any] | None, tokenizer: LoadedTokenizer, add_bos: bool) -> dict[str, Any] | None:
    """The post-processor that adds BOS or nothing. Of the `given` one only the rule of offsets stays."""
    steps = given.get("processors", [given]) if given else []
    steps = [step for step in steps if step["type"] == "ByteLevel"]
    if add_bos:
        bos = tokenizer.special["bos_token"]
        start: list[dict[str, Any]] = [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        steps.append(
            {
                "type": "TemplateProcessing",
                "single": start,
                "pair": [*start, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {bos: {"id": bos, "ids": [tokenizer.backend.token_to_id(bos)], "tokens": [bos]}},
            }
        )
    return {"type": "Sequence", "processors": steps} if len(steps) > 1 else steps[0] if steps else None


def tokenizer_sha256(tokenizer: LoadedTokenizer) -> str:
    """Hash of the rules as loaded or trained (`save_tokenizer` changes the start token of the copy)."""
    return hashlib.sha256(tokenizer.backend.to_str(pretty=True).encode()).hexdigest()


def describe_tokenizer(tokenizer: LoadedTokenizer, add_bos: bool) -> TokenizerInfo:
    """The manifest's entry of a tokenizer. DataError if `add_bos` and it has no BOS."""
    backend, special = tokenizer.backend, tokenizer.special
    if add_bos and "bos_token" not in special:
        raise DataError(f"data.bos=true, but tokenizer {tokenizer.name} has no bos_token: set data.bos=false")
    bos = special.get("bos_token")
    eos_id = backend.token_to_id(special["eos_token"])
    assert eos_id is not None  # `special` holds only tokens of the vocabulary
    return TokenizerInfo(
        name=tokenizer.name,
        sha256=tokenizer_sha256(tokenizer),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=backend.token_to_id(bos) if bos is not None else None,
        eos_id=eos_id,
        add_bos=add_bos,
    )
