"""The optimiser's kernel, in Triton's interpreter."""

from __future__ import annotations

from tests.kernels.test_triton import HERE, run


def test_the_kernel_in_the_interpreter() -> None:
    done = run("-m", "pytest", str(HERE / "interpreted_adamw.py"), "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
