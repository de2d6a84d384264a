"""Training checkpoints: sharded by torch.distributed.checkpoint, whole or not there at all, read by any number of
processes.

    RUN/checkpoints/step-N/
        .metadata, __R_0.distcp   tensors `model.NAME` and `optim.NAME.{step,exp_avg,exp_avg_sq}`, fp32
        config.json               the model's Hugging Face config
        meta.json                 run, step, tokens, identity, checksums of the files, where the tokenizer is
    RUN/checkpoints/step-N.tmp    being written, or left by a crash: never read

They are written by `efla_lm.run.save`, found and read here, and checked by `efla_lm.run.verify`.

`identity` holds what a continued run must share with the saved one (model, data fingerprint, context, batch, seed). The
learning rate and the data position are functions of the step, and nothing after the initial weights draws random
numbers, so that no more needs to be kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from efla_lm.errors import UserError
from efla_lm.parallel.distributed import World
from efla_lm.run.meta import META, CheckpointMeta, read_meta
from efla_lm.run.tensor_index import empty_tensors, read_index, read_into, shapes
from efla_lm.run.verify import damage_in

MODEL = "model."  # the names of weights begin so


def checkpoints_in(run_dir: Path) -> list[Path]:
    """Directories `step-N` of a run, by step; complete or not."""
    found = [p for p in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(step_dir: Path) -> int:
    return int(step_dir.name.removeprefix("step-"))


def newest_checkpoint(
    run_dir: Path, warn: Callable[[str], None] = print, fault: Callable[[Path], str | None] = damage_in
) -> Path | None:
    """The newest whole checkpoint of a run, or None if the run has none yet; passing over a damaged one is reported.

    fault: says why one cannot be used (`efla_lm.run.verify`). Raises UserError where checkpoints are there and none
    is whole: starting again from nothing must be the user's decision.
    """
    found = checkpoints_in(run_dir)
    for step_dir in reversed(found):
        why = fault(step_dir)
        if why is None:
            return step_dir
        warn(f"passing over a damaged checkpoint: {why}")
    if found:
        raise UserError(f"{run_dir}/checkpoints: none of {len(found)} is whole; remove them to start again")
    return None


def find_checkpoint(
    path: Path, warn: Callable[[str], None] = print, fault: Callable[[Path], str | None] = damage_in
) -> Path:
    """The checkpoint that `path` (a run directory or a step-N directory) means. Raises UserError if there is none."""
    if (path / META).is_file() or re.fullmatch(r"step-\d+", path.name):
        if why := fault(path):
            raise UserError(f"damaged checkpoint: {why}")
        return path
    newest = newest_checkpoint(path, warn, fault)
    if newest is None:
        raise UserError(f"{path}: no checkpoint here (expected checkpoints/step-N/{META})")
    return newest


def check_identity(step_dir: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise UserError naming the first key in which this run differs from the saved one."""
    for key in dict.fromkeys([*saved, *ours]):  # data.packing before what belongs to it
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
            tensors[f"{MODEL}{name}"] = tensor
    if optimizer is not None:
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                tensors[f"optim.{name}.{key}"] = value
    return tensors


def load_checkpoint(step_dir: Path, model: nn.Module, optimizer: Optimizer | None, world: World) -> CheckpointMeta:
    """Read a checkpoint of any world size into the (sharded) model and optimiser, in place, and return its meta.

    Raises UserError naming the tensor if one is missing, left over, or of another shape.
    """
    tensors = training_tensors(model, optimizer)
    saved = {k: s for k, s in shapes(read_index(step_dir)).items() if optimizer is not None or k.startswith(MODEL)}
    ours = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({*saved, *ours}):
        if saved.get(name) != ours.get(name):
            there, here = saved.get(name, "no such tensor"), ours.get(name, "no such tensor")
            raise UserError(f"{step_dir}: checkpoint of another model: {name} is {there} there and {here} here")
    read_into(tensors, step_dir, world.control)
    return read_meta(step_dir)


def load_model_weights(step_dir: Path, verified: bool = False) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint as a state dict on the CPU, read by one process with no process group.

    Of tied parameters only the first name is there: tie after loading. verified: whether `find_checkpoint` has checked
    them. Raises UserError if the checkpoint is not whole.
    """
    tensors = read_tensors(step_dir, MODEL, verified)
    return {name.removeprefix(MODEL): tensor for name, tensor in tensors.items()}


def read_tensors(step_dir: Path, prefix: str = "", verified: bool = False) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint whose names begin with `prefix`, on the CPU, by name."""
    if not verified and (fault := damage_in(step_dir, prefix)):
        raise UserError(f"damaged checkpoint: {fault}")
    tensors = empty_tensors(read_index(step_dir), lambda name: name.startswith(prefix))
    read_into(tensors, step_dir)
    return tensors


def weights_damage(step_dir: Path) -> str | None:
    """Why the model of this checkpoint cannot be used, or None; the optimiser's state is not read."""
    return damage_in(step_dir, MODEL)


def tokenizer_dir(step_dir: Path) -> Path:
    """The folder of the tokenizer that a checkpoint was trained with. Raises UserError for one outside its run."""
    place = step_dir.resolve()
    given = read_meta(step_dir).tokenizer
    folder = (place / given).resolve()
    if place.parent.parent not in folder.parents:
        raise UserError(f"{step_dir / META}: tokenizer: expected a folder of the run, got {given!r}")
    return folder
