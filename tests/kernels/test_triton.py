"""The Triton kernels on a CPU: `interpreted.py` in a process of its own, where Triton interprets its kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.interpreter import expect_passes, run

pytest.importorskip("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kernels",
    ["interpreted", "interpreted_gradient", "interpreted_decode", "interpreted_ssd", "interpreted_ssd_model"],
)
def test_kernels_in_the_interpreter(kernels: str) -> None:
    expect_passes(kernels)


@pytest.mark.timeout(300)
def test_selftest_without_an_accelerator(tmp_path: Path) -> None:
    """`make selftest` says what it does on a CPU, passes, and stores what it ran on."""
    file = tmp_path / "selftest.json"
    done = run("-m", "efla_kernels.selftest", "--only", "K 16", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no accelerator" in done.stdout and "1 of 1 rows pass" in done.stdout
    assert '"torch"' in file.read_text()
