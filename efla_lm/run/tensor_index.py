"""The index of a checkpoint's tensors, `.metadata`, read without running code.

torch.distributed.checkpoint pickles its index, and unpickling may call anything that the file names. This reader puts a
record without behaviour in place of each class that such an index needs (`ADMITTED`) and refuses every other name. It
then makes torch's Metadata from the records, and checks that each tensor is covered by its chunks exactly and each
chunk by a range of its own in a file of the checkpoint's folder.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from efla_lm.errors import UserError

INDEX = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")
ADMITTED = {
    *((_METADATA, name) for name in (*_CLASSES, "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    *(("torch", name) for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32")),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # Python 3.11 pickles a member of an enumeration so
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class _Record:
    """Stands for an object of an admitted class: what it was called with, and its state."""

    name: str
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        self = object.__new__(cls)
        self.args, self.state = args, None
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RecordUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise ValueError(f"it names {module}.{name}, which an index does not need and which could run code")
        return type(name, (_Record,), {"name": name})


class SafeReader(FileSystemReader):
    """torch's reader, with the index read by `read_index`. torch reads tensors with torch.load(weights_only=True)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))


def read_index(step_dir: Path) -> Metadata:
    """The checked index of a checkpoint folder. Raises UserError naming the file where it is anything else."""
    path = step_dir / INDEX
    try:
        found = _state(_RecordUnpickler(io.BytesIO(path.read_bytes())).load(), "Metadata")
        tensors = {_text(name): _tensor(record) for name, record in found["state_dict_metadata"].items()}
        stored = dict(_stored(*item) for item in found["storage_data"].items())
        _check(tensors, stored, step_dir)
    except Exception as error:  # a damaged pickle may raise nearly any error
        raise UserError(f"{path}: not the index of a checkpoint: {error or type(error).__name__}") from None
    return Metadata(dict(tensors), planner_data={}, storage_data=stored, storage_meta=StorageMeta())


def read_into(tensors: dict[str, Any], step_dir: Path, process_group: ProcessGroup | None = None) -> None:
    """Read the checkpoint's tensors of these names, in place; with a process group each rank reads its shards.

    Raises UserError where what is stored is no tensor of the shape that the index says.
    """
    with warnings.catch_warnings():
        # without a group torch warns that it assumes a single process, which is right
        warnings.simplefilter("ignore", UserWarning)
        reader = SafeReader(step_dir)
        try:
            dcp.load(tensors, storage_reader=reader, process_group=process_group, no_dist=process_group is None)
        except CheckpointException as error:
            if any(isinstance(cause, KeyboardInterrupt) for cause, _ in error.failures.values()):
                raise KeyboardInterrupt from None
            kinds = ", ".join(sorted({type(cause).__name__ for cause, _ in error.failures.values()}))
            raise UserError(f"damaged checkpoint: {step_dir}: its tensors cannot be read ({kinds})") from error


def shapes(index: Metadata) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by name."""
    tensors: Any = index.state_dict_metadata
    return {name: tuple(tensor.size) for name, tensor in tensors.items()}


def empty_tensors(index: Metadata, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """A tensor on the CPU to read into, for every name that is wanted."""
    tensors: Any = index.state_dict_metadata
    return {name: torch.empty(t.size, dtype=t.properties.dtype) for name, t in tensors.items() if wanted(name)}


def _tensor(record: Any) -> TensorStorageMetadata:
    state = _state(record, "TensorStorageMetadata")
    dtype = getattr(torch, _text(getattr(_state(state["properties"], "TensorProperties")[0], "name", None)))
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
    boxes = [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(state["size"]), boxes)


def _stored(key: Any, value: Any) -> tuple[MetadataIndex, _StorageInfo]:
    place, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
    name, (offset, length) = _text(info["relative_path"]), _size([info["offset"], info["length"]])
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"the path {name!r} leaves the folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{name} is stored with {info['transform_descriptors']}")
    number = place.get("index")
    if number is not None:
        _size([number])
    return MetadataIndex(_text(place["fqn"]), _size(place["offset"]), number), _StorageInfo(name, offset, length)


def _state(record: Any, name: str) -> Any:
    """The state of a record of this class. A constant (a dtype) is a class of records, and has a name alone."""
    if not isinstance(record, _Record) or record.name != name:
        raise ValueError(f"expected {name}, found {record!r:.80}")
    return record.state


def _size(value: Any) -> torch.Size:
    """A torch.Size, from its record or from numbers; all numbers are natural."""
    numbers = value.args[0] if isinstance(value, _Record) and value.name == "Size" else value
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"expected sizes, found {numbers!r:.80}")
    return torch.Size(numbers)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a name, found {value!r:.80}")
    return value


def _check(
    tensors: dict[str, TensorStorageMetadata], stored: dict[MetadataIndex, _StorageInfo], step_dir: Path
) -> None:
    """Raise ValueError unless every tensor is stored exactly once."""
    expected = {(name, tuple(chunk.offsets)) for name, tensor in tensors.items() for chunk in tensor.chunks}
    found = {(place.fqn, tuple(place.offset or ())) for place in stored}
    if wrong := sorted(expected ^ found):
        name, offsets = wrong[0]
        fault = "is not stored" if wrong[0] in expected else "belongs to no tensor"
        raise ValueError(f"the chunk of {name} at {list(offsets)} {fault}")
    for name, tensor in tensors.items():
        _check_cover(name, tensor)
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for info in stored.values():
        ranges[info.relative_path].append((info.offset, info.offset + info.length))
    for name, spans in ranges.items():
        size = (step_dir / name).stat().st_size if (step_dir / name).is_file() else 0
        if (needed := max(end for _, end in spans)) > size:
            raise ValueError(f"{name} should have at least {needed} bytes, has {size}")
        if any(start < end for (_, end), (start, _) in itertools.pairwise(sorted(spans))):
            raise ValueError(f"{name} has overlapping ranges")


def _check_cover(name: str, tensor: TensorStorageMetadata) -> None:
    """Raise ValueError unless the chunks fill the tensor without a gap or an overlap."""
    shape = tensor.size
    for chunk in tensor.chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(shape)
        if not inside or any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            raise ValueError(f"{name} has shape {list(shape)} and a chunk of {chunk.sizes} at {chunk.offsets}")
    volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
    if volume != math.prod(shape):
        raise ValueError(f"the chunks of {name} hold {volume} of {math.prod(shape)} numbers")
    boxes = sorted((chunk.offsets, chunk.sizes) for chunk in tensor.chunks if math.prod(chunk.sizes) > 0)
    for number, (offsets, sizes) in enumerate(boxes if shape else []):
        for other, extent in boxes[number + 1 :]:
            if other[0] >= offsets[0] + sizes[0]:
                break
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, sizes, other, extent, strict=True)):
                raise ValueError(f"the chunks of {name} at {list(offsets)} and {list(other)} overlap")
