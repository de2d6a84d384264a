"""Gradients in every layout that autograd hands to the kernels: `interpreted_layouts.py` in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.kernels.interpreter import expect_passes


@pytest.mark.timeout(600)
def test_gradients_in_every_layout() -> None:
    expect_passes("interpreted_layouts")
