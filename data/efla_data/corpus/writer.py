"""Write token files: the stream of ids, the document ends, their hashes. For `prepare`, and for ids made elsewhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from efla_data.corpus.manifest import Manifest, Shard, TokenizerInfo, make_split
from efla_data.errors import DataError
from efla_data.loader.token_file import INDEX_DTYPE, token_dtype


class ShardWriter:
    """Append documents to `PREFIX.bin` and `PREFIX.idx`; a context manager. Memory does not grow with the file."""

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype) -> None:
        self.prefix, self.dtype = Path(prefix), dtype
        self.tokens = self.documents = self.text_bytes = 0
        self._bin = open(f"{self.prefix}.bin", "wb", buffering=1 << 20)  # noqa: SIM115 (closed by close())
        self._idx = open(f"{self.prefix}.idx", "wb", buffering=1 << 16)  # noqa: SIM115
        self._hashes = hashlib.sha256(), hashlib.sha256()

    def add(self, ids: np.ndarray, text_bytes: int = 0) -> None:
        """One document, special tokens included."""
        self.add_many(ids.astype(self.dtype, copy=False), np.array([len(ids)], dtype=np.int64), text_bytes)

    def add_many(self, ids: np.ndarray, ends: np.ndarray, text_bytes: int) -> None:
        """Several documents: their ids in one array, and the end of each within it."""
        self._write(0, ids.astype(self.dtype, copy=False))
        self._write(1, (ends.astype(np.int64) + self.tokens).astype(INDEX_DTYPE))
        self.tokens += len(ids)
        self.documents += len(ends)
        self.text_bytes += text_bytes

    def _write(self, which: int, values: np.ndarray) -> None:
        data = values.tobytes()
        (self._bin, self._idx)[which].write(data)
        self._hashes[which].update(data)

    def close(self) -> Shard:
        """Flush to the disk and describe the two files."""
        for handle in (self._bin, self._idx):
            handle.flush()
            os.fsync(handle.fileno())
            handle.close()
        name = self.prefix.name
        return Shard(
            tokens_file=f"{name}.bin",
            index_file=f"{name}.idx",
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=self.text_bytes,
            tokens_sha256=self._hashes[0].hexdigest(),
            index_sha256=self._hashes[1].hexdigest(),
        )

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._bin.close()
        self._idx.close()


def write_token_files(
    out_dir: str | os.PathLike[str],
    documents: Mapping[str, Iterable[Sequence[int] | np.ndarray]],
    vocab_size: int,
    eos_id: int,
    bos_id: int | None = None,
) -> Manifest:
    """Token files from ids: `documents` maps "train" and "heldout" to documents, each ending in `eos_id`.

    The folder gets no `tokenizer/`. DataError for an id outside 0 <= id < vocab_size or a document without its EOS.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = token_dtype(vocab_size)
    tokenizer = TokenizerInfo("ids", "", vocab_size, bos_id, eos_id, add_bos=bos_id is not None)
    splits = {}
    for split, split_documents in documents.items():
        with ShardWriter(folder / f"{split}-00000", dtype) as writer:
            for number, document in enumerate(split_documents):
                ids = np.asarray(document, dtype=np.int64)
                if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocab_size or ids[-1] != eos_id:
                    expected = f"ids in 0..{vocab_size - 1} with {eos_id} (EOS) last"
                    raise DataError(f"{split} document {number}: expected {expected}, got {ids[:5]}..{ids[-1:]}")
                writer.add(ids)
            splits[split] = make_split(dtype.name, tokenizer, [writer.close()])
    manifest = Manifest(dtype=dtype.name, tokenizer=tokenizer, splits=splits)
    manifest.save(folder)
    return manifest
