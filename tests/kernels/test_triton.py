"""The Triton kernels on a CPU: `interpreted.py` in a process of its own, where Triton interprets its kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    folders = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    settings = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **settings}, cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kernels",
    ["interpreted", "interpreted_gradient", "interpreted_decode", "interpreted_ssd", "interpreted_ssd_model"],
)
def test_kernels_in_the_interpreter(kernels: str) -> None:
    done = run("-m", "pytest", str(HERE / f"{kernels}.py"), "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.timeout(300)
def test_selftest_without_an_accelerator(tmp_path: Path) -> None:
    """`make selftest` says what it does on a CPU, passes, and stores what it ran on."""
    file = tmp_path / "selftest.json"
    done = run("-m", "efla_kernels.selftest", "--only", "K 16", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no accelerator" in done.stdout and "1 of 1 rows pass" in done.stdout
    assert '"torch"' in file.read_text()
