"""Between our models and other libraries': `python -m scripts.convert checkpoint=FOLDER to=efla_lm out=FOLDER`.

to=efla_lm reads a folder of transformers' Mamba-2 or of flash-linear-attention's Mamba-2, DeltaNet or Gated DeltaNet;
to=transformers and to=fla read a run, step or export of ours. Equal logits: tensors are renamed, cut or joined, and
stored in fp32 as every export is. Neither library's model is built, and flash-linear-attention need not be installed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from efla_lm.errors import UserError
from efla_lm.evaluation.checkpoints import find
from efla_lm.models import EflaForCausalLM
from efla_lm.models.conversion import LAYOUTS, from_layout, to_layout
from efla_lm.models.pretrained import load_causal_lm, load_own_config
from efla_lm.run.checkpoint import tokenizer_dir
from efla_lm.run.export import load_model, whole_folder
from efla_lm.run.tokenizer_files import copy_tokenizer
from efla_lm.settings import entry
from efla_lm.settings.fields import MISSING, PATH, key


@dataclass
class ConvertSettings:
    """All of `python -m scripts.convert`."""

    checkpoint: str = key(
        MISSING, "a folder with config.json and safetensors; to another library: also a run or step-N folder", path=PATH
    )
    to: str = key(MISSING, "whose names and configuration to write", choices=("efla_lm", *LAYOUTS))
    out: str = key(MISSING, "folder to write; an older export there is replaced", path=PATH)


@entry("convert", ConvertSettings)
def main(settings: ConvertSettings) -> int:
    """Write a model of ours for another library, or another library's as one of ours."""
    logging.disable_progress_bar()
    convert = to_ours if settings.to == "efla_lm" else to_others
    kind = convert(settings.checkpoint, settings.to, Path(settings.out))
    print(f"{settings.checkpoint}: {kind} written to {settings.out} for {settings.to}")
    return 0


def to_ours(checkpoint: str, _: str, out: Path) -> str:
    """An export of ours from another library's folder. Returns the kind of model."""
    source = Path(checkpoint).expanduser()
    config, state = from_layout(*read_folder(source))
    model = EflaForCausalLM(config)
    expected = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    found = {name: tuple(x.shape) for name, x in state.items()}
    if wrong := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        name = wrong[0]
        raise UserError(f"{source}: {name} should be {expected.get(name, 'absent')}, is {found.get(name, 'missing')}")
    model.load_state_dict(state)
    with whole_folder(out) as partial:
        model.save_pretrained(partial)
        keep_tokenizer(source, partial)
    return config.mixer


def to_others(checkpoint: str, layout: str, out: Path) -> str:
    """Another library's folder from a run, step or export of ours. Returns the kind of model."""
    found = find(checkpoint)
    if found.kind == "step":
        model: Any = load_model(Path(found.location), verified=True)
        tokenizer = tokenizer_dir(Path(found.location))
    else:
        model, tokenizer = load_export(Path(found.location)), Path(found.location)
    state = {name: x.float().contiguous() for name, x in model.state_dict().items()}
    written, tensors = to_layout(layout, model.config, state)
    with whole_folder(out) as partial:
        write_folder(written, tensors, layout, partial)
        keep_tokenizer(tokenizer, partial)
    return str(model.config.mixer)


def load_export(folder: Path) -> Any:
    """Our model of an export. Raises UserError for another library's folder."""
    return load_causal_lm(folder, config=load_own_config(folder))


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors in fp32. Raises UserError where one of them is missing."""
    if not (folder / "config.json").is_file():
        raise UserError(f"checkpoint={folder}: expected a folder with config.json in it")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no safetensors file; load the model with its library and save_pretrained it anew")
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return given, {name: x.float() for file in files for name, x in load_file(file).items()}
    except (ValueError, RecursionError, SafetensorError) as error:
        raise UserError(f"{folder}: config.json or weights cannot be read: {error}") from None


def write_folder(written: dict[str, Any], tensors: dict[str, Tensor], layout: str, folder: Path) -> None:
    """config.json as the library itself writes it, and model.safetensors."""
    if layout == "transformers":
        from transformers import Mamba2Config

        Mamba2Config(**{k: v for k, v in written.items() if k != "model_type"}).save_pretrained(folder)
    else:
        (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def keep_tokenizer(source: Path, folder: Path) -> None:
    """The tokenizer's files, where the source has them."""
    if not copy_tokenizer(source, folder):
        print(f"{source} has no tokenizer: put one beside the weights before eval.py or scripts.generate read them")


if __name__ == "__main__":
    main()
