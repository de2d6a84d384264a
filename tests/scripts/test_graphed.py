"""A step that may be a CUDA graph: on a CPU every call is made (on a GPU: tests/gpu/test_experiments.py)."""

from __future__ import annotations

import torch

from scripts.stacked.cuda_graph import GraphedStep


def test_every_call_runs_on_a_cpu() -> None:
    total, given = torch.zeros(()), torch.zeros(())

    def work() -> None:
        total.add_(given)

    step = GraphedStep(work, torch.device("cpu"))
    for value in (1.0, 2.0, 4.0):
        given.fill_(value)
        step()
    assert total.item() == 7.0
