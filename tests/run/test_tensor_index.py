"""The index of a checkpoint is read without running code, and covers its tensors exactly or is refused."""

from __future__ import annotations

import functools
import operator
import os
import pickle
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex

from efla_lm.errors import UserError
from efla_lm.run.tensor_index import INDEX, empty_tensors, read_index, read_into, shapes

TENSORS = {
    "model.a": torch.arange(12.0).view(3, 4),
    "model.scalar": torch.tensor(2.5),
    "model.empty": torch.zeros(0, 3),
    "optim.a.exp_avg": torch.arange(6.0).bfloat16(),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "step-1"
    dcp.save(dict(TENSORS), storage_writer=FileSystemWriter(place), no_dist=True)
    return place


def test_reads_what_torch_wrote(folder: Path) -> None:
    index, theirs = read_index(folder), FileSystemReader(folder).read_metadata()
    assert shapes(index) == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert index.state_dict_metadata == theirs.state_dict_metadata
    assert index.storage_data == theirs.storage_data
    found = empty_tensors(index, lambda name: True)
    read_into(found, folder)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )
    assert empty_tensors(index, lambda name: name.startswith("optim.")).keys() == {"optim.a.exp_avg"}


class Calls:
    """Unpickling it calls `function(*arguments)`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def touching(mark: Path) -> dict[str, Any]:
    """Pickles that make the file `mark` when they are loaded."""
    return {
        "os.system": Calls(os.system, f"touch {mark}"),
        "exec": Calls(exec, f"open({str(mark)!r}, 'w')"),
        "eval": Calls(eval, f"open({str(mark)!r}, 'w')"),
        "open": Calls(open, str(mark), "w"),
        "subprocess": Calls(subprocess.Popen, ["touch", str(mark)]),
        "partial": Calls(functools.partial(os.system, f"touch {mark}")),
        "attrgetter": Calls(operator.methodcaller("touch"), mark),
        "getattr": Calls(Calls(getattr, mark, "touch")),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("kind", list(touching(Path("x"))))
@pytest.mark.parametrize("deep", [False, True], ids=["alone", "inside an index"])
def test_runs_no_code(folder: Path, tmp_path: Path, kind: str, deep: bool) -> None:
    evil = touching(tmp_path / "ran")[kind]
    good = FileSystemReader(folder).read_metadata()
    content = replace(good, planner_data={"x": evil}) if deep else evil
    data = pickle.dumps(content) if kind != "getattr" else b"cbuiltins\ngetattr\n(cos\nsystem\nVx\ntR."
    (folder / INDEX).write_bytes(data)
    with pytest.raises(UserError, match=r"\.metadata: not the index of a checkpoint"):
        read_index(folder)
    assert not (tmp_path / "ran").exists()


def edited(folder: Path, change: Callable[[Metadata], object]) -> Path:
    """Write the index of `folder` anew after `change`."""
    index = FileSystemReader(folder).read_metadata()
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))
    return folder


def chunk(*numbers: int) -> ChunkStorageMetadata:
    half = len(numbers) // 2
    return ChunkStorageMetadata(torch.Size(numbers[:half]), torch.Size(numbers[half:]))


def place(index: Metadata, name: str) -> MetadataIndex:
    return next(at for at in index.storage_data if at.fqn == name)


def set_chunks(*chunks: ChunkStorageMetadata) -> Callable[[Metadata], None]:
    def change(index: Metadata) -> None:
        index.state_dict_metadata["model.a"].chunks = list(chunks)  # type: ignore[union-attr]
        info = index.storage_data.pop(place(index, "model.a"))
        for number, piece in enumerate(chunks):  # each with a range of its own
            at = MetadataIndex("model.a", piece.offsets, number)
            index.storage_data[at] = replace(info, offset=info.offset + number, length=1)

    return change


def set_info(**values: Any) -> Callable[[Metadata], None]:
    def change(index: Metadata) -> None:
        at = place(index, "model.a")
        index.storage_data[at] = replace(index.storage_data[at], **values)

    return change


def as_bytes(index: Metadata) -> None:
    """torch would unpickle what is stored here."""
    index.state_dict_metadata["model.a"] = BytesStorageMetadata()


def set_size(*shape: int) -> Callable[[Metadata], None]:
    return lambda index: setattr(index.state_dict_metadata["model.a"], "size", torch.Size(shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_chunks(chunk(0, 0, 3, 4)), None),
        (set_chunks(chunk(0, 0, 2, 4), chunk(2, 0, 1, 4)), None),
        (set_chunks(chunk(0, 0, 3, 2), chunk(0, 2, 3, 2)), None),
        (set_chunks(chunk(0, 0, 3, 4), chunk(3, 0, 0, 4)), None),  # the empty share of one rank too many
        (set_chunks(chunk(0, 0, 2, 4)), "hold 8 of 12"),
        (set_chunks(chunk(0, 0, 0, 4)), "hold 0 of 12"),
        (set_chunks(), "hold 0 of 12"),
        (set_chunks(chunk(0, 0, 2, 4), chunk(1, 0, 1, 4)), "overlap"),
        (set_chunks(chunk(0, 0, 3, 2), chunk(1, 1, 2, 3)), "overlap"),
        (set_chunks(chunk(1, 0, 3, 4)), "has shape"),
        (set_chunks(chunk(0, 12)), "has shape"),
        (set_size(1 << 60, 4), "hold 12 of"),
        (as_bytes, "Bytes"),
        (lambda index: index.state_dict_metadata.pop("model.a"), "belongs to no tensor"),
        (lambda index: index.storage_data.pop(place(index, "model.a")), "is not stored"),
        (set_info(relative_path="../secret"), "leaves the folder"),
        (set_info(relative_path="/etc/passwd"), "leaves the folder"),
        (set_info(relative_path="sub/__0_0.distcp"), "leaves the folder"),
        (set_info(relative_path=".."), "leaves the folder"),
        (set_info(relative_path=""), "leaves the folder"),
        (set_info(relative_path="__1_0.distcp"), "has 0"),
        (set_info(offset=-1), "expected sizes"),
        (set_info(length=1 << 40), "should have at least"),
        (set_info(offset=2), "overlapping ranges"),
        (set_info(transform_descriptors=["zstd"]), "stored with"),
    ],
)
def test_tensors_are_covered_exactly(folder: Path, change: Callable[[Metadata], object], message: str | None) -> None:
    edited(folder, change)
    if message is None:
        read_index(folder)
    else:
        with pytest.raises(UserError, match=rf"\.metadata: not the index of a checkpoint: .*{message}"):
            read_index(folder)


@pytest.mark.parametrize("content", [b"", b"x", b"N.", b"(lp0\n.", b"r\xff\xff\xff\x7f.", pickle.dumps({"a": 1})])
def test_anything_else_is_refused(folder: Path, content: bytes) -> None:
    (folder / INDEX).write_bytes(content)
    with pytest.raises(UserError, match="not the index"):
        read_index(folder)


def test_every_flipped_byte_is_refused_or_harmless(folder: Path) -> None:
    """Without a checksum, too: no flip ends in another exception, in tensors that are not whole, or in code."""
    content = (folder / INDEX).read_bytes()
    for position in range(len(content)):
        for bit in (1, 128):
            changed = bytearray(content)
            changed[position] ^= bit
            (folder / INDEX).write_bytes(changed)
            try:
                index = read_index(folder)
            except UserError:
                continue
            assert len(shapes(index)) == len(TENSORS)
