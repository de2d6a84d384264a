"""What a measurement ran on: GPU, driver, versions, commit. Stored beside every self-test and benchmark result."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def describe_environment() -> dict[str, Any]:
    """GPU, driver, CUDA, Python, package versions and commit; None where something is not there to be known."""
    device = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": None if device is None else device.name,
        "multiprocessors": None if device is None else device.multi_processor_count,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "ptxas": os.environ.get("TRITON_PTXAS_PATH"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: installed_version(name) for name in ("triton", "flash-linear-attention")},
        "commit": commit(),
    }


def commit() -> str | None:
    """EFLA_COMMIT where it is set (a copy has no history), else the checkout's, -dirty where tracked files differ."""
    if "EFLA_COMMIT" in os.environ:
        return os.environ["EFLA_COMMIT"]
    folder = str(Path(__file__).parent)
    head = _first_line("git", "-C", folder, "rev-parse", "HEAD")
    if head is None:
        return None
    changed = _first_line("git", "-C", folder, "status", "--porcelain", "--untracked-files=no")
    return head + ("-dirty" if changed else "")


def _first_line(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
