"""Which device a command runs on."""

from __future__ import annotations

import torch

from efla_lm.errors import UserError


def choose_device(name: str, key: str = "device") -> torch.device:
    """`auto` = the first GPU if there is one, else the CPU; `cpu`; `cuda`.

    key: what set `name`, for the message. Raises UserError for another name, or where cuda is asked for and torch sees
    none.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"{key}: expected auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{key}=cuda but torch sees no CUDA device: use {key}=auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
