"""What the experiments' commands refuse before data are read and models made."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from efla_kernels.backends import lacks_gpu

from efla_lm.errors import UserError


def check_backend(name: str, device: torch.device) -> None:
    """Raise UserError for a backend of GPUs on a CPU."""
    if lacks_gpu(name, device):
        raise UserError(f"backend={name} needs a GPU, the device is {device}: set auto or torch")


def check_rates(rates: Iterable[float]) -> None:
    """Raise UserError for learning rates that are not above 0."""
    for rate in rates:
        if rate <= 0:
            raise UserError(f"rates: got {rate}, expected learning rates above 0")
