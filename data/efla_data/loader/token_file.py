"""Read one split of a folder of token files: a memory-mapped stream of ids and the places where documents end.

    train-00000.bin   N token ids, uint16 (vocabulary <= 65536) or uint32, little-endian
    train-00000.idx   D document ends, uint64, little-endian: document d is tokens[ends[d-1]:ends[d]], with EOS

A large split has several shards, -00001 and so on; documents do not cross them, and each index counts from the start
of its own shard. Nothing is loaded on open, so files of any size cost a few pages of memory.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efla_data.corpus.manifest import AGAIN, Manifest, Shard, load_manifest
from efla_data.errors import DataError
from efla_data.loader.concatenated import ConcatenatedArray

INDEX_DTYPE = np.dtype("<u8")


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 while every id fits, else uint32; little-endian."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def file_sha256(path: str | os.PathLike[str]) -> str:
    """sha256 of a file, read in blocks."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@dataclass(frozen=True, eq=False)
class TokenFile:
    """One split, open for reading. `tokens` [N], `document_ends` [D]: memory maps, or concatenated shards."""

    folder: Path
    split: str
    manifest: Manifest
    tokens: np.ndarray | ConcatenatedArray
    document_ends: np.ndarray | ConcatenatedArray

    @classmethod
    def open(cls, folder: str | os.PathLike[str], split: str = "train", verify: bool = False) -> TokenFile:
        """Open `split` ("train" or "heldout") of `folder`.

        Always checks the manifest, that all files exist with the right size, and that the last document of each shard
        ends at its last token. `verify=True` also reads every byte and compares sha256. DataError names the file.
        """
        folder = Path(folder).absolute()
        manifest = load_manifest(folder)
        if split not in manifest.splits:
            have = ", ".join(sorted(manifest.splits)) or "none"
            raise DataError(f"{folder} has no split {split!r} (it has: {have}); prepare it with held-out documents")
        dtype = np.dtype(manifest.dtype).newbyteorder("<")
        shards = manifest.splits[split].shards
        if not shards:
            raise DataError(f"{folder}: damaged manifest, split {split!r} has no shard; {AGAIN}")
        maps = [_open_shard(folder, shard, dtype, verify) for shard in shards]
        if len(maps) == 1:
            return cls(folder, split, manifest, *maps[0])
        starts = np.cumsum([0, *(shard.tokens for shard in shards)])[:-1]
        tokens = ConcatenatedArray([tokens for tokens, _ in maps])
        return cls(folder, split, manifest, tokens, ConcatenatedArray([ends for _, ends in maps], starts.tolist()))

    @property
    def num_tokens(self) -> int:
        """N: ids in the stream, EOS (and BOS) included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """D."""
        return len(self.document_ends)

    @property
    def fingerprint(self) -> str:
        """Hash of the content of this split (see `manifest.split_fingerprint`)."""
        return self.manifest.splits[self.split].fingerprint

    @property
    def vocab_size(self) -> int:
        """Largest id the tokenizer can give, plus one."""
        return self.manifest.tokenizer.vocab_size

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the text behind the tokens: the unit of bits per byte."""
        return self.manifest.splits[self.split].text_bytes

    @property
    def tokenizer_dir(self) -> Path:
        """Folder of the tokenizer that made the ids, loadable by `AutoTokenizer.from_pretrained`."""
        return self.folder / "tokenizer"

    def document(self, index: int) -> np.ndarray:
        """Ids of one document, BOS (if switched on) and EOS included. IndexError outside 0 <= index < D."""
        if not 0 <= index < self.num_documents:
            where = f"{self.folder} ({self.split})"
            raise IndexError(f"document {index} of {where}: expected 0 <= index < {self.num_documents}")
        bounds = self.document_ends[max(index - 1, 0) : index + 1]
        start, end = int(bounds[0]) if index else 0, int(bounds[-1])
        if not start <= end <= self.num_tokens:
            raise self.damaged_index(f"document {index} is from token {start} to {end}")
        return self.tokens[start:end]

    def damaged_index(self, found: str) -> DataError:
        """The error for document ends that do not rise from 0 to N."""
        return DataError(f"{self.folder} ({self.split}): damaged index (*.idx), {found} of {self.num_tokens}; {AGAIN}")

    def check_ids(self, ids: np.ndarray, position: int) -> None:
        """DataError where one of `ids`, read from about `position` of the stream on, is not in the vocabulary."""
        if ids.size and (highest := int(ids.max())) >= self.vocab_size:
            shards = self.manifest.splits[self.split].shards
            bounds = np.cumsum([shard.tokens for shard in shards])
            name = shards[min(int(np.searchsorted(bounds, position, side="right")), len(shards) - 1)].tokens_file
            raise DataError(
                f"{self.folder / name}: damaged, token id {highest} at about token {position} of {self.split}, but the "
                f"vocabulary has {self.vocab_size} ids; {AGAIN}"
            )

    def check_vocabulary(self, model_vocab_size: int) -> None:
        """DataError when the ids do not fit a model with `model_vocab_size` embeddings."""
        if self.vocab_size > model_vocab_size:
            raise DataError(
                f"tokenizer of {self.folder} has {self.vocab_size} ids, the model has vocab_size={model_vocab_size}: "
                f"set model.vocab_size={self.vocab_size} or more"
            )


def _open_shard(folder: Path, shard: Shard, dtype: np.dtype, verify: bool) -> tuple[np.ndarray, np.ndarray]:
    """Maps of ids and document ends of one shard, checked."""
    tokens = _map(folder / shard.tokens_file, dtype, shard.tokens)
    ends = _map(folder / shard.index_file, INDEX_DTYPE, shard.documents)
    last = int(ends[-1]) if len(ends) else 0
    if last != shard.tokens:
        where = folder / shard.index_file
        raise DataError(f"{where}: corrupt, last document should end at token {shard.tokens}, ends at {last}; {AGAIN}")
    if verify:
        _check_hashes(folder, shard)
    return tokens, ends


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not path.is_file():
        raise DataError(f"missing token file {path}, which the manifest lists; {AGAIN}")
    size, expected = path.stat().st_size, count * dtype.itemsize
    if size != expected:
        raise DataError(f"{path}: truncated or altered, expected {expected} bytes, got {size}; {AGAIN}")
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def _check_hashes(folder: Path, shard: Shard) -> None:
    for name, expected in ((shard.tokens_file, shard.tokens_sha256), (shard.index_file, shard.index_sha256)):
        got = file_sha256(folder / name)
        if got != expected:
            raise DataError(f"{folder / name}: corrupt, expected sha256 {expected}, got {got}; {AGAIN}")
