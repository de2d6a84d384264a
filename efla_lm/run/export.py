"""From a training checkpoint to a Hugging Face folder: config.json, model.safetensors (fp32), the tokenizer.

One process reads the checkpoint; nothing is collective, so nothing can wait for a rank that does not come.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from transformers.utils import logging

from efla_lm.errors import UserError
from efla_lm.models import EflaForCausalLM
from efla_lm.models.pretrained import load_own_config
from efla_lm.run.checkpoint import load_model_weights, tokenizer_dir
from efla_lm.run.tokenizer_files import copy_tokenizer, tokenizer_files


def load_model(step_dir: Path, verified: bool = False) -> EflaForCausalLM:
    """The model of a checkpoint, fp32 on the CPU, in evaluation mode, with backend `auto`: it may be used where the
    one that trained it does not run.

    verified: whether `find_checkpoint` has checked the weights. Raises UserError if the two do not fit.
    """
    config = load_own_config(step_dir)
    config.backend = "auto"
    model = EflaForCausalLM(config)
    try:
        missing, unexpected = model.load_state_dict(load_model_weights(step_dir, verified), strict=False)
    except RuntimeError as error:  # a tensor of another shape
        raise UserError(f"{step_dir}: its tensors do not fit its config.json: {' '.join(str(error).split())}") from None
    model.tie_weights()
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    if wrong := sorted({*missing, *unexpected} - tied):
        raise UserError(f"{step_dir}: its tensors do not fit its config.json: {wrong[0]} is missing or left over")
    return model.eval()


def export_checkpoint(step_dir: Path, out: Path, verified: bool = False) -> Path:
    """Write the model and tokenizer of a checkpoint to `out`, for `AutoModelForCausalLM.from_pretrained` after
    `import efla_lm`. The folder appears whole, in place of an older export. Returns `out`.

    Raises UserError if the tokenizer is missing, or if `out` holds anything but an export.
    """
    tokenizer = tokenizer_dir(step_dir)
    if not tokenizer_files(tokenizer):
        raise UserError(f"{tokenizer}: the tokenizer of {step_dir} is missing, so the export would be incomplete")
    model = load_model(step_dir, verified)
    with whole_folder(out) as partial:
        logging.disable_progress_bar()  # one bar per file, drawn over the live line of training
        model.save_pretrained(partial)
        copy_tokenizer(tokenizer, partial)
    return out


def _remove_left_overs(out: Path) -> None:
    """Remove what exports left that were killed; an older export that one of them had put aside comes back."""
    for path in out.parent.glob(f"{out.name}.*"):
        match = re.fullmatch(r"\.(\d+)\.(tmp|old)", path.name.removeprefix(out.name))
        if match is None or _runs(int(match[1])):
            continue
        if match[2] == "old" and not out.exists():
            path.rename(out)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` once the block is done, in place of an older export.

    Raises UserError if `out` holds anything but an export.
    """
    if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: holds something else than an export; choose another folder")
    _remove_left_overs(out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    partial.mkdir(parents=True)
    try:
        try:
            yield partial
        except SafetensorError as error:  # of the disk: it says nothing of the file
            raise UserError(f"{out}: not written, its weights cannot be stored there ({error}); make room") from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
            raise UserError(f"{out}: not written ({error.strerror}); make room, or choose another folder") from error
        if out.exists():
            os.rename(out, partial.with_suffix(".old"))
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(partial.with_suffix(".old"), ignore_errors=True)
