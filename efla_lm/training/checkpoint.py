"""Training checkpoints: sharded by torch.distributed.checkpoint, whole or not there at all, read by any number of
processes.

    RUN/checkpoints/step-N/
        .metadata, __R_0.distcp   tensors `model.NAME` and `optim.NAME.{step,exp_avg,exp_avg_sq}`, fp32
        config.json               the model's Hugging Face config
        meta.json                 step, tokens, identity, sizes of the files, where the tokenizer is
    RUN/checkpoints/step-N.tmp    being written, or left by a crash: never read

A save writes into `step-N.tmp`, checks that every tensor lies in a file of full length, writes meta.json last,
flushes to disk and renames. So a kill at any moment leaves the older checkpoints as they were.

`identity` holds what a continued run must share with the saved one (model, data fingerprint, context, batch, seed). The
learning rate, the data position and the random streams are functions of the step, so they need no storage.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from efla_lm.errors import UserError
from efla_lm.training.distributed import World, local

FORMAT = 1
META = "meta.json"


@dataclass(frozen=True)
class CheckpointMeta:
    """What meta.json says. Paths in it are relative to the checkpoint, so that a run directory can be moved."""

    step: int  # updates done, which is also the index of the next one
    tokens: int  # positions consumed
    identity: dict[str, Any]
    skipped_steps: int = 0
    tokenizer: str = "../../tokenizer"
    world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)  # name -> bytes, of all other files here
    format: int = FORMAT


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Directories `step-N` of a run, by step; complete or not."""
    found = [p for p in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return sorted(found, key=_step_of)


def _step_of(step_dir: Path) -> int:
    return int(step_dir.name.removeprefix("step-"))


def fault_in(step_dir: Path) -> str | None:
    """Why this checkpoint cannot be used, or None if it is whole (a check of sizes: it reads no tensors)."""
    try:
        meta = read_meta(step_dir)
    except UserError as error:
        return str(error)
    for name, size in meta.files.items():
        path = step_dir / name
        if not path.is_file() or path.stat().st_size != size:
            got = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
            return f"{path}: expected {size} bytes, found {got}"
    return None


def newest_checkpoint(run_dir: Path, warn: Callable[[str], None] = print) -> Path | None:
    """The newest whole checkpoint of a run, or None if the run has none yet; passing over a damaged one is reported.

    Raises UserError where checkpoints are there and none is whole: starting again from nothing must be the user's
    decision.
    """
    found = checkpoints_in(run_dir)
    for step_dir in reversed(found):
        fault = fault_in(step_dir)
        if fault is None:
            return step_dir
        warn(f"passing over a damaged checkpoint: {fault}")
    if found:
        raise UserError(f"{run_dir}/checkpoints: none of {len(found)} is whole; remove them to start again")
    return None


def find_checkpoint(path: Path, warn: Callable[[str], None] = print) -> Path:
    """The checkpoint that `path` (a run directory or a step-N directory) means. Raises UserError if there is none."""
    if (path / META).is_file() or re.fullmatch(r"step-\d+", path.name):
        if fault := fault_in(path):
            raise UserError(f"damaged checkpoint: {fault}")
        return path
    newest = newest_checkpoint(path, warn)
    if newest is None:
        raise UserError(f"{path}: no checkpoint here (expected checkpoints/step-N/{META})")
    return newest


def read_meta(step_dir: Path) -> CheckpointMeta:
    path = step_dir / META
    try:
        content = json.loads(path.read_text())
        if content.get("format") != FORMAT:
            raise UserError(f"{path}: expected format {FORMAT}, got {content.get('format')}")
        return CheckpointMeta(**content)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, so the checkpoint is not whole") from None
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not a checkpoint description ({error})") from None


def check_identity(step_dir: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise UserError naming the first key in which this run differs from the saved one."""
    for key in sorted({*saved, *ours}):
        if saved.get(key) != ours.get(key):
            raise UserError(
                f"{step_dir}: saved with {key}={saved.get(key)!r}, this run has {key}={ours.get(key)!r}: "
                f"set it back to continue, or choose a new name= (or resume=never) to start another run"
            )


def training_tensors(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """All tensors of the training state by name; tied parameters once. They share storage with the model and
    optimiser."""
    tensors: dict[str, Tensor] = {}
    state = model.state_dict()  # FSDP's hooks make sure that these are the sharded masters
    names = [name for name, _ in model.named_parameters()]
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(names)
    for name, tensor in state.items():
        if name not in shared:
            tensors[f"model.{name}"] = tensor
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensors[f"optim.{name}.{key}"] = value
    return tensors


def save_checkpoint(
    run_dir: Path,
    model: nn.Module,
    optimizer: Optimizer,
    meta: CheckpointMeta,
    world: World,
    write_config: Callable[[Path], None],
    keep: int = 0,
) -> Path:
    """Save the training state as `RUN/checkpoints/step-N` (all ranks call this) and return that path.

    write_config: writes the model's config.json into a folder. keep: how many checkpoints stay (0: all).
    Raises UserError where the disk is full (the unfinished files are removed) or a weight is not finite; older
    checkpoints are untouched then.
    """
    final = run_dir / "checkpoints" / f"step-{meta.step}"
    partial = final.with_name(final.name + ".tmp")
    tensors = training_tensors(model, optimizer)
    _refuse_non_finite(tensors, final, world)
    needed = sum(t.numel() * t.element_size() for t in tensors.values())

    def prepare() -> None:
        for left_over in final.parent.glob("step-*.tmp"):
            shutil.rmtree(left_over)
        partial.mkdir(parents=True)
        free = shutil.disk_usage(partial).free
        if free < needed:
            partial.rmdir()
            raise _disk_full(final, needed, free)

    def complete() -> None:
        write_config(partial)
        _check_all_there(partial, world)
        files = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        content = {**asdict(meta), "world_size": world.size, "versions": _versions(), "files": files}
        with (partial / META).open("w") as stream:
            json.dump(content, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _flush_directory(partial)
        _retire(final)  # only a damaged one can be there
        os.rename(partial, final)
        _flush_directory(final.parent)
        # a damaged one may have a later step than this one, which is whole: it must not count as one of those kept
        earlier = [path for path in checkpoints_in(run_dir) if _step_of(path) < meta.step]
        for old in earlier[: max(len(earlier) - keep + 1, 0)] if keep > 0 else []:
            _retire(old)

    world.on_main(prepare)
    try:
        dcp.save(tensors, storage_writer=FileSystemWriter(partial), process_group=world.control)
        world.on_main(complete)
    except (CheckpointException, OSError, RuntimeError) as error:
        if not world.is_main:
            raise SystemExit(1) from None  # rank 0 tells why
        full = any(_says_no_space(cause) for cause in _causes(error))
        full |= shutil.disk_usage(final.parent).free < needed // 100  # torch may wrap the reason beyond recognition
        shutil.rmtree(partial, ignore_errors=True)
        if full:
            raise _disk_full(final, needed, shutil.disk_usage(final.parent).free) from None
        raise
    return final


def load_checkpoint(step_dir: Path, model: nn.Module, optimizer: Optimizer | None, world: World) -> CheckpointMeta:
    """Read a checkpoint of any world size into the (sharded) model and optimiser, in place, and return its meta.

    Raises UserError naming the tensor if one is missing, left over, or of another shape.
    """
    tensors = training_tensors(model, optimizer)
    saved = {k: s for k, s in _saved_sizes(step_dir).items() if optimizer is not None or k.startswith("model.")}
    ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({*saved, *ours}):
        if saved.get(name) != ours.get(name):
            there, here = saved.get(name, "no such tensor"), ours.get(name, "no such tensor")
            raise UserError(f"{step_dir}: checkpoint of another model: {name} is {there} there and {here} here")
    dcp.load(tensors, storage_reader=FileSystemReader(step_dir), process_group=world.control)
    return read_meta(step_dir)


def load_model_weights(step_dir: Path) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint as a state dict on the CPU, read by one process with no process group.

    Of tied parameters only the first name is there: tie after loading. Raises UserError if the checkpoint is not whole.
    """
    return {name.removeprefix("model."): tensor for name, tensor in read_tensors(step_dir, "model.").items()}


def read_tensors(step_dir: Path, prefix: str = "") -> dict[str, Tensor]:
    """The whole tensors of a checkpoint whose names begin with `prefix`, on the CPU, by name."""
    if fault := fault_in(step_dir):
        raise UserError(f"damaged checkpoint: {fault}")
    tensors: dict[str, Any] = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype)
        for name, meta in _metadata(step_dir).state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata) and name.startswith(prefix)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming the intent is to load in a single process": it is
        dcp.load(tensors, storage_reader=FileSystemReader(step_dir), no_dist=True)
    return tensors


def tokenizer_dir(step_dir: Path) -> Path:
    """The folder of the tokenizer that a checkpoint was trained with."""
    return (step_dir / read_meta(step_dir).tokenizer).resolve()


def _metadata(step_dir: Path) -> Metadata:
    return FileSystemReader(step_dir).read_metadata()


def _saved_sizes(step_dir: Path) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(meta.size)
        for name, meta in _metadata(step_dir).state_dict_metadata.items()
        if isinstance(meta, TensorStorageMetadata)
    }


def _check_all_there(partial: Path, world: World) -> None:
    """Every tensor that the ranks say they wrote lies inside a file of this folder."""
    for info in _metadata(partial).storage_data.values():
        path = partial / info.relative_path
        size = path.stat().st_size if path.exists() else -1
        if size < info.offset + info.length:
            hint = "" if world.size == world.local_size else " (all nodes must write to one shared file system)"
            raise RuntimeError(f"{path}: expected at least {info.offset + info.length} bytes, found {size}{hint}")


def _refuse_non_finite(tensors: Mapping[str, Tensor], final: Path, world: World) -> None:
    bad = [name for name, tensor in tensors.items() if not local(tensor).isfinite().all()]
    if names := sorted({name for rank in world.gather(bad[:1]) for name in rank}):
        raise UserError(f"{final}: not saved, {names[0]} holds NaN or infinity; continue from an earlier checkpoint")


def _retire(step_dir: Path) -> None:
    """Delete a checkpoint; it stops being one before its first file goes."""
    if step_dir.exists():
        gone = step_dir.with_name(step_dir.name + ".old.tmp")
        os.rename(step_dir, gone)
        shutil.rmtree(gone)


def _flush_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _causes(error: BaseException) -> Iterator[BaseException]:
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None:
            continue
        yield current
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, CheckpointException):
            waiting += [failure for failure, _ in current.failures.values()]


def _says_no_space(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _disk_full(final: Path, needed: int, free: int) -> UserError:
    return UserError(
        f"no space left for {final}, which needs {needed / 2**20:,.1f} MiB (the disk shows {free / 2**20:,.1f} MiB "
        "free); earlier checkpoints are untouched: make room, or lower train.keep_checkpoints, and continue the run"
    )


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}
