"""From what the user calls a checkpoint to a model and its tokenizer.

RUN                        its newest whole RUN/checkpoints/step-N, or RUN/export if there are none
RUN/checkpoints/step-N     that step
RUN/export, any folder     a Hugging Face causal model with config.json and weights
ORG/NAME                   a model on the hub
"""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

import efla_lm  # noqa: F401  registers our model with the Auto classes
from efla_lm.errors import UserError
from efla_lm.models.pretrained import load_causal_lm, load_tokenizer
from efla_lm.parallel.distributed import is_whole
from efla_lm.run.checkpoint import find_checkpoint, newest_checkpoint, tokenizer_dir, weights_damage
from efla_lm.run.export import load_model as load_step
from efla_lm.run.meta import read_meta

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
RUN_CONFIG = "config.yaml"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found; the weights of a step are verified.

    kind: `step`, `folder` or `hub`; `run_dir` and `step` where they are known.
    """

    kind: str
    location: str
    run_dir: Path | None = None
    step: int | None = None

    @property
    def label(self) -> str:
        """Short name for files: `step-300`, `export`, `org--name`."""
        if self.kind == "hub":
            return self.location.replace("/", "--")
        return Path(self.location).name


def find(given: str) -> Checkpoint:
    """What `checkpoint=given` means.

    Raises:
        UserError: it is no folder and no hub name, or a folder without a model.
    """
    path = Path(given).expanduser()
    if not path.exists():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", given) and not given.startswith(("runs/", ".")):
            return Checkpoint("hub", given)
        raise UserError(f"checkpoint={given}: no such folder; expected a run, a step-N or export folder, or a hub name")
    path = path.absolute()
    if re.fullmatch(r"step-\d+", path.name):
        step = find_checkpoint(path, _warn, weights_damage)
        return Checkpoint("step", str(step), _run_of(step.parent.parent), read_meta(step).step)
    if (path / "config.json").is_file():
        return Checkpoint("folder", str(path), _run_of(path.parent))
    if (path / "checkpoints").is_dir() or (path / "export").is_dir() or (path / RUN_CONFIG).is_file():
        step_dir = newest_checkpoint(path, _warn, weights_damage)
        if step_dir is not None:
            return Checkpoint("step", str(step_dir), path, read_meta(step_dir).step)
        if (path / "export" / "config.json").is_file():
            return Checkpoint("folder", str(path / "export"), path)
        raise UserError(f"checkpoint={given}: the run has neither a whole checkpoint nor an export yet")
    raise UserError(f"checkpoint={given}: expected a run (checkpoints/, export/) or a model (config.json) in it")


def _run_of(folder: Path) -> Path | None:
    return folder if (folder / RUN_CONFIG).is_file() else None


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr)


def load(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """(model in evaluation mode on the CPU with the dtype that is stored, tokenizer).

    Raises:
        UserError: weights, configuration or tokenizer are missing, or do not fit together.
    """
    transformers.utils.logging.disable_progress_bar()
    local = checkpoint.kind != "hub"
    if checkpoint.kind == "step":
        step_dir = Path(checkpoint.location)
        tokenizer, model = load_tokenizer(tokenizer_dir(step_dir)), load_step(step_dir, verified=True)
    else:
        tokenizer = load_tokenizer(checkpoint.location, local)
        model = load_causal_lm(checkpoint.location, local)
    largest = max(tokenizer.get_vocab().values())
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise UserError(f"{checkpoint.location}: the tokenizer has ids up to {largest}, the model {rows} embeddings")
    return model.eval(), tokenizer


def place(model: Any, dtype: str, device: torch.device) -> Any:
    """Cast the weights to `fp32` or `bf16` and move the model, in place.

    Buffers (rotary frequencies) keep their dtype, and so do the few decay parameters that training keeps in fp32.
    """
    for name, parameter in model.named_parameters():
        if not is_whole(name):
            parameter.data = parameter.data.to(DTYPES[dtype])
    return model.to(device)


def weights_hash(model: Any) -> str:
    """sha256 over names, dtypes, shapes and bytes of all weights, sorted by name: equal for a step and its export."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def context_length(model: Any, tokenizer: Any) -> int:
    """Training context of a model: the configuration's, else the tokenizer's, else 2048 (in the order of lm-eval)."""
    config = getattr(model.config, "text_config", None) or model.config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if (value := getattr(config, name, None)) is not None:
            return int(value)
    limit = getattr(tokenizer, "model_max_length", None)
    return int(limit) if limit is not None and limit < 1 << 31 else 2048


def token_folder(checkpoint: Checkpoint) -> Path:
    """The folder of token files that a run was trained on, from its resolved configuration.

    Raises:
        UserError: the checkpoint belongs to no run, or the run's configuration does not name the folder.
    """
    if checkpoint.run_dir is None:
        raise UserError(f"{checkpoint.location} belongs to no run ({RUN_CONFIG}): give tasks.data_dir=FOLDER")
    found = _run_setting(checkpoint, "data", "dir")
    if not isinstance(found, str):
        raise UserError(f"{checkpoint.run_dir / RUN_CONFIG} names no data.dir: give tasks.data_dir=FOLDER")
    return Path(found)


def trained_with_bos(checkpoint: Checkpoint) -> bool | None:
    """Whether documents opened with BOS in training (data.bos of the run), or None where that is not known."""
    return _run_setting(checkpoint, "data", "bos")


def describe_model(checkpoint: Checkpoint, model: Any) -> dict[str, Any]:
    """What tables sort results by: family, parameters, and of a run its size, seed and name; null where not known."""
    return {
        "family": getattr(model.config, "mixer", model.config.model_type),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "size": _run_setting(checkpoint, "size", "name"),
        "seed": _run_setting(checkpoint, "seed"),
        "run": checkpoint.run_dir.name if checkpoint.run_dir else None,
    }


def _run_setting(checkpoint: Checkpoint, *names: str) -> Any:
    """A value of the run's resolved configuration, or None where it is not known."""
    if checkpoint.run_dir is None:
        return None
    path = checkpoint.run_dir / RUN_CONFIG
    if not path.is_file():
        return None
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path}: expected the settings of a run in YAML ({first}); mend it or move it away") from None
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value
