"""What the experiments' commands refuse before data are read and models made."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from efla_kernels.backends import lacks_gpu

from efla_lm.errors import UserError


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one. Raises UserError where cuda is asked for and absent."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda but torch sees no CUDA device: use device=auto or cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def check_backend(name: str, device: torch.device) -> None:
    """Raise UserError for a backend of GPUs on a CPU."""
    if lacks_gpu(name, device):
        raise UserError(f"backend={name} needs a GPU, the device is {device}: set auto or torch")


def check_rates(rates: Iterable[float]) -> None:
    """Raise UserError for learning rates that are not above 0."""
    for rate in rates:
        if rate <= 0:
            raise UserError(f"rates: got {rate}, expected learning rates above 0")
