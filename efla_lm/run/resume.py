"""Which checkpoint a launch resumes from, and what the two must have in common."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from efla_lm.errors import UserError
from efla_lm.models import EflaConfig
from efla_lm.run.checkpoint import check_identity, checkpoints_in, find_checkpoint
from efla_lm.run.meta import read_meta
from efla_lm.run.tokenizer_files import copy_tokenizer
from efla_lm.run.verify import fault_in
from efla_lm.settings import ModelSettings

# Fields of the config that say how the model is computed, not what it is. Launches of one run may differ in them.
FREE_FIELDS = {"backend", "initializer_range", "max_position_embeddings"}


def run_identity(
    model: ModelSettings, config: EflaConfig, data: dict[str, Any], batch_tokens: int, seed: int
) -> dict[str, Any]:
    """What a resumed run must share with its checkpoint, by the name of the key that sets it.

    data: `efla_lm.training.data.data_identity`.
    """
    fields = {f"model.{name}": getattr(config, name) for name in asdict(model) if name not in FREE_FIELDS}
    return fields | data | {"train.batch_tokens": batch_tokens, "seed": seed}


def find_resume(run_dir: Path | None, resume: str, identity: dict[str, Any], *, locked: bool) -> Path | None:
    """The checkpoint to resume from, or None to start a new run. run_dir: None if the run has no name.

    locked: whether this launch holds the lock of the run. Only what is found then counts, with all bytes checked:
    another launch may have saved since an earlier look. A look without the lock is silent and checks sizes alone; it
    refuses a wrong command before anything is made or written.

    Raises UserError if the named checkpoint is missing, if it differs in a key of `identity`, or if the run directory
    holds later checkpoints than it, which the next resume=auto would take instead.
    """
    if resume == "never":
        return None
    automatic = resume == "auto"
    if automatic and (run_dir is None or not checkpoints_in(run_dir)):
        return None
    place = run_dir if automatic and run_dir else Path(resume)
    checkpoint = find_checkpoint(place) if locked else find_checkpoint(place, lambda message: None, fault_in)
    meta = read_meta(checkpoint)
    check_identity(checkpoint, meta.identity, identity)
    for other in checkpoints_in(run_dir) if run_dir and not automatic else []:  # with auto all later ones are damaged
        if fault_in(other) is None and read_meta(other).step > meta.step:
            raise UserError(f"{other} is later than {checkpoint}: remove it to go back, or choose a new name=")
    return checkpoint


def keep_tokenizer(tokenizer_dir: Path, run_dir: Path) -> None:
    """Copy the tokenizer of the token files into the run, where its checkpoints refer to it.

    A tokenizer that is there stays if the run has checkpoints. Without any, it may be that of other data, from a launch
    that saved nothing.
    """
    target = run_dir / "tokenizer"
    if target.exists() and checkpoints_in(run_dir):
        return
    partial = run_dir / "tokenizer.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    copy_tokenizer(tokenizer_dir, partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
