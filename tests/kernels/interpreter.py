"""Processes in which Triton interprets its kernels: whether it does, it decides at its import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, on a CPU."""
    folders = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **settings}, cwd=ROOT, capture_output=True, text=True
    )


def expect_passes(kernels: str) -> None:
    """The tests of a file of this folder pass; skips the caller where there is no Triton."""
    pytest.importorskip("triton")
    done = run("-m", "pytest", str(HERE / f"{kernels}.py"), "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
