"""Tokenizers, configurations and models of transformers, from a folder or the hub: the code that comes with them is
never run, and every fault is one error that names the folder."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from efla_lm.errors import UserError
from efla_lm.models.config import EflaConfig

NO_CODE: Any = {"trust_remote_code": False}  # None would ask on the terminal


def load_tokenizer(place: str | Path, local: bool = True) -> Any:
    """The tokenizer of a folder, or of the hub or its cache. Raises UserError where it is missing or needs its own
    code."""
    if local and not any((Path(place) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"{place}: no tokenizer here (expected tokenizer.json)")
    with _one_error(place, "the tokenizer", local):
        return AutoTokenizer.from_pretrained(str(place), local_files_only=local, **NO_CODE)


def load_config(place: str | Path, local: bool = True) -> Any:
    """The configuration of a model of ours, of transformers, or of flash-linear-attention where that is installed.

    Raises UserError where it is missing, damaged or needs its own code.
    """
    with _one_error(place, "the configuration", local):
        try:
            return AutoConfig.from_pretrained(str(place), local_files_only=local, **NO_CODE)
        except ValueError:
            with contextlib.suppress(ImportError):
                importlib.import_module("fla")  # registers its models
                return AutoConfig.from_pretrained(str(place), local_files_only=local, **NO_CODE)
            raise


def load_own_config(folder: Path) -> EflaConfig:
    """The configuration of a model of ours. Raises UserError for any other, and where it is missing or damaged."""
    config = load_config(folder)
    if not isinstance(config, EflaConfig):
        raise UserError(f"{folder}: no model of ours (config.json has no model_type {EflaConfig.model_type!r})")
    return config


def load_causal_lm(place: str | Path, local: bool = True, config: Any = None, dtype: str = "auto") -> Any:
    """The causal model of a folder, or of the hub or its cache, with all of its weights.

    config: what `load_config` read. Raises UserError where weights are missing or do not fit.
    """
    config = load_config(place, local) if config is None else config
    factory: Any = AutoModelForCausalLM
    with _one_error(place, "the model", local):
        model, report = factory.from_pretrained(
            str(place),
            config=config,
            dtype=dtype,
            local_files_only=local,
            weights_only=True,
            output_loading_info=True,
            **NO_CODE,
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{place}: {len(missing)} weights are missing, the first is {missing[0]}")
    return model


@contextlib.contextmanager
def _one_error(place: str | Path, what: str, local: bool) -> Iterator[None]:
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # damaged files make the libraries raise errors of many kinds
        text = str(error).strip()
        if "trust_remote_code" in text:
            raise UserError(
                f"{place}: {what} needs code that comes with it (auto_map), which is never run here; convert it to "
                "classes of transformers"
            ) from None
        first = text.splitlines()[0] if text else type(error).__name__
        taken = "" if local else " (no folder of that name is here, so that it was taken for one of the hub)"
        known = isinstance(error, OSError | ValueError | RuntimeError | SafetensorError)
        raise UserError(
            f"{place}: {what} cannot be loaded{taken}: {first if known else f'{type(error).__name__}: {first}'}"
        ) from error
