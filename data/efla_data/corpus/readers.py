"""The documents of one piece, and counts of the records that are left out, by reason.

    jsonl     one object per line, the text in `text_field`
    parquet   one row, the same
    txt       one file
    hub       one row of a streamed data set
    pydoc     one topic of Python's own documentation (`pydoc_data.topics`)

A bad document is skipped and counted. A file that cannot be read to its end is an error: else nothing would tell that
its text is missing.
"""

from __future__ import annotations

import codecs
import dataclasses
import gzip
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from efla_data.corpus.sources import Piece, file_piece, open_hub, parse_hub
from efla_data.errors import DataError

REASONS = ("empty", "bad_utf8", "bad_json", "missing_field", "not_text", "bad_unicode")
EXAMPLES = 20  # per piece, and in the manifest


class Tally:
    """Counts of one piece: records read, documents returned, records skipped by reason; the first few are named."""

    def __init__(self) -> None:
        self.records = self.documents = 0
        self.skipped: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    def skip(self, path: str, reason: str) -> None:
        """Count a record that is left out; its number within the piece is `records`."""
        self.skipped[reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append({"file": path, "record": self.records, "reason": reason})


def read_documents(piece: Piece, text_field: str, tally: Tally) -> Iterator[tuple[str, bytes]]:
    """Yield every usable document of a piece as (text, UTF-8). White space alone is no document. `tally` counts."""
    for value in _values(piece, text_field, tally):
        if value is None:
            continue
        if not isinstance(value, str):
            tally.skip(piece.path, "not_text")
            continue
        try:
            encoded = value.encode()
        except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which is no character
            tally.skip(piece.path, "bad_unicode")
            continue
        if not value.strip():
            tally.skip(piece.path, "empty")
            continue
        tally.documents += 1
        yield value, encoded


def _values(piece: Piece, text_field: str, tally: Tally) -> Iterator[Any]:
    """Raw values of the text field; None where a record was already counted as skipped."""
    if piece.kind == "jsonl":
        return _jsonl(piece, text_field, tally)
    if piece.kind == "parquet":
        return _parquet(piece, text_field, tally)
    if piece.kind == "txt":
        return _txt(piece, tally)
    if piece.kind == "hub":
        return _hub(piece, text_field, tally)
    return _counted(pydoc_topics(), tally)


def _counted(values: list[str], tally: Tally) -> Iterator[str]:
    for value in values:
        tally.records += 1
        yield value


def pydoc_topics() -> list[str]:
    """The documentation topics inside CPython, by name: about 80 texts, 0.46 MB of English (PSF licence)."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _jsonl(piece: Piece, text_field: str, tally: Tally) -> Iterator[Any]:
    for line in _lines(piece):
        tally.records += 1
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError:
            tally.skip(piece.path, "bad_utf8")
        except (ValueError, RecursionError):  # ValueError: syntax, or an integer beyond Python's limit of digits
            tally.skip(piece.path, "bad_json")
        else:
            if isinstance(record, dict) and record.get(text_field) is not None:
                yield record[text_field]
            else:
                tally.skip(piece.path, "missing_field" if isinstance(record, dict) else "bad_json")


def _lines(piece: Piece) -> Iterator[bytes]:
    """Lines that begin inside the piece; a byte order mark at the start of the file is dropped."""
    with open_file(piece) as handle:
        position = piece.start
        if piece.start:
            handle.seek(piece.start - 1)
            position += len(handle.readline()) - 1  # the line that runs into this piece belongs to the one before
        while piece.compression or position < piece.stop:
            line = _guarded(piece, handle.readline)
            if not line:
                return
            yield line.removeprefix(codecs.BOM_UTF8) if position == 0 else line
            position += len(line)


def _txt(piece: Piece, tally: Tally) -> Iterator[str | None]:
    tally.records += 1
    with open_file(piece) as handle:
        content = _guarded(piece, handle.read)
    try:
        yield content.decode("utf-8-sig")
    except UnicodeDecodeError:
        tally.skip(piece.path, "bad_utf8")


def _parquet(piece: Piece, text_field: str, tally: Tally) -> Iterator[str | None]:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(piece.path) as file:
            names = file.schema_arrow.names
            if text_field not in names:
                raise DataError(
                    f"{piece.path}: no column {text_field!r} (it has {', '.join(names)}): set data.text_field"
                )
            kind = file.schema_arrow.field(text_field).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if kind not in (pa.string(), pa.large_string(), pa.string_view()):
                raise DataError(f"{piece.path}: column {text_field!r} should hold strings, holds {kind}")
            groups = list(range(piece.start, piece.stop))
            for batch in file.iter_batches(batch_size=64, row_groups=groups, columns=[text_field]):
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                # as bytes: one bad string must not make the whole batch fail
                for value in column.cast(pa.large_binary()).to_pylist():
                    tally.records += 1
                    yield _decoded(piece, value, tally)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{piece.path}: unreadable or truncated parquet file ({error})") from error


def _decoded(piece: Piece, value: bytes | None, tally: Tally) -> str | None:
    if value is None:
        tally.skip(piece.path, "missing_field")
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        tally.skip(piece.path, "bad_utf8")
        return None


def _hub(piece: Piece, text_field: str, tally: Tally) -> Iterator[Any]:
    name, config, split = parse_hub(piece.path, "")
    stream = open_hub(name, config, split, piece.revision)
    if stream.column_names and text_field not in stream.column_names:
        have = ", ".join(stream.column_names)
        raise DataError(f"{piece.path}: no column {text_field!r} (it has {have}): set data.text_field")
    rows = iter(stream.shard(num_shards=piece.stop, index=piece.start))
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # whatever the network or the hub reports: named
            where = f"{piece.path} shard {piece.start + 1} of {piece.stop}, after {tally.records} rows"
            raise DataError(f"{where}: {error}; finished parts are kept, run the command again") from error
        tally.records += 1
        value = row.get(text_field)
        if value is None:
            tally.skip(piece.path, "missing_field")
        yield value


def read_records(path: Path) -> Iterator[list[str]]:
    """All strings of every record of a file, in any field: JSON lines, parquet rows, or a text file as one record.

    Unlike `read_documents`, it raises DataError for a line that cannot be read.
    """
    piece = file_piece(str(path), heldout=False)
    if piece.kind == "txt":
        yield [text for text in _txt(piece, Tally()) if text]
    elif piece.kind == "parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from (list(_strings(row)) for row in batch.to_pylist())
    else:
        whole = dataclasses.replace(piece, stop=piece.bytes)
        for number, line in enumerate(_lines(whole), start=1):
            if line.strip():
                try:
                    yield list(_strings(json.loads(line)))
                except ValueError as error:
                    raise DataError(f"{path}: line {number} is no JSON ({error})") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def open_file(piece: Piece) -> BinaryIO:
    """The decompressed bytes of a file."""
    if piece.compression and piece.bytes == 0:  # some readers take no bytes for a complete file
        raise DataError(f"{piece.path}: truncated or damaged {piece.compression} file (it has no bytes)")
    try:
        if piece.compression == "gz":
            return cast(BinaryIO, gzip.open(piece.path, "rb"))
        if piece.compression == "xz":
            return cast(BinaryIO, lzma.open(piece.path, "rb"))
        if piece.compression == "zst":
            return cast(BinaryIO, io.BufferedReader(_ZstdReader(piece.path), 1 << 20))
        return open(piece.path, "rb", buffering=1 << 20)
    except FileNotFoundError as error:
        raise DataError(f"data.sources: {piece.path} does not exist any more") from error


def _guarded(piece: Piece, read: Any) -> bytes:
    """Call `read`. A truncated or damaged stream becomes a DataError that names the file."""
    try:
        return read()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, _ZstdError) as error:
        raise DataError(f"{piece.path}: truncated or damaged {piece.compression} file ({error})") from error


class _ZstdError(Exception):
    pass


class _ZstdReader(io.RawIOBase):
    """All frames of a .zst file. Unlike the library's own reader it notices a truncated file.

    The library has no bound on what one call unpacks: 4 bytes can hold 128 KiB. So it gets INPUT bytes at a time, of
    which at most 64 MiB come out.
    """

    INPUT = 1 << 11

    def __init__(self, path: str) -> None:
        import zstandard

        self._library = zstandard
        self._file = open(path, "rb")  # noqa: SIM115 (closed by close())
        self._frame: Any = None
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(self.INPUT)
                if not self._input:
                    if self._frame is not None:
                        raise _ZstdError("the last frame is incomplete")
                    return 0
            if self._frame is None:
                # a window of up to 2 GiB, as `zstd --long=31` writes
                self._frame = self._library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._library.ZstdError as error:
                raise _ZstdError(str(error)) from error
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
