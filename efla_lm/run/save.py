"""Write a training checkpoint so that it is whole or not there (its format: `efla_lm.run.checkpoint`).

A save writes into `step-N.tmp`, checks that every tensor is in a file of full length, reads all files for their
checksums, writes meta.json last, flushes to disk and renames. So a kill at any moment leaves the older checkpoints as
they were.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.optim import Optimizer

from efla_lm.errors import UserError
from efla_lm.parallel.distributed import World, local
from efla_lm.run.checkpoint import checkpoints_in, step_of, training_tensors
from efla_lm.run.checksums import BLOCK, FileSum, file_sums
from efla_lm.run.meta import CheckpointMeta, write_meta
from efla_lm.run.tensor_index import read_index


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

    def complete(shards: dict[str, FileSum]) -> None:
        write_config(partial)
        _check_all_there(partial, world)
        others = [path for path in sorted(partial.iterdir()) if path.name not in shards]
        files = file_sums(others, BLOCK) | shards
        write_meta(
            partial,
            replace(meta, run=run_dir.name, world_size=world.size, versions=_versions(), block=BLOCK, files=files),
        )
        _flush_directory(partial)
        _retire(final)  # only a damaged one can be there
        os.rename(partial, final)
        _flush_directory(final.parent)
        # a damaged one may have a later step than this one, which is whole: it must not count as one of those kept
        earlier = [path for path in checkpoints_in(run_dir) if step_of(path) < meta.step]
        for old in earlier[: max(len(earlier) - keep + 1, 0)] if keep > 0 else []:
            _retire(old)

    world.on_main(prepare)
    try:
        dcp.save(tensors, storage_writer=FileSystemWriter(partial), process_group=world.control)
        shards = _sums_of_shards(partial, world)
        world.on_main(lambda: complete(shards))
    except (CheckpointException, OSError, RuntimeError) as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause in _causes(error)):
            raise KeyboardInterrupt from None  # the second Ctrl-C, which torch wraps
        if not world.is_main:
            raise SystemExit(1) from None  # rank 0 tells why
        full = any(_says_no_space(cause) for cause in _causes(error))
        full |= shutil.disk_usage(final.parent).free < needed // 100  # torch may wrap the reason beyond recognition
        shutil.rmtree(partial, ignore_errors=True)
        if full:
            raise _disk_full(final, needed, shutil.disk_usage(final.parent).free) from None
        raise
    return final


def _sums_of_shards(partial: Path, world: World) -> dict[str, FileSum]:
    """Checksums of all files of tensors; each rank reads those that it wrote."""
    sums: dict[str, FileSum] | OSError
    try:
        sums = file_sums(sorted(partial.glob(f"__{world.rank}_*")), BLOCK)
    except OSError as error:
        sums = error
    found: dict[str, FileSum] = {}
    for share in world.gather(sums):
        if isinstance(share, OSError):
            raise share
        found |= share
    return found


def _check_all_there(partial: Path, world: World) -> None:
    """Every tensor is inside a file of this folder."""
    try:
        read_index(partial)
    except UserError as error:
        hint = "" if world.size == world.local_size else " (all nodes must write to one shared file system)"
        raise RuntimeError(f"{error}{hint}") from None


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
        "free); earlier checkpoints are untouched: make room there, lower train.keep_checkpoints, or move the run and "
        "set runs_dir to where it lies then; the same command goes on"
    )


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "transformers": transformers.__version__}
