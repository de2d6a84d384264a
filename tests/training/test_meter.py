"""The clock of training: what counts as its time."""

from __future__ import annotations

import pytest
import torch

from efla_lm.training import meter as module
from efla_lm.training.meter import Meter


def test_start_up_and_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of a minute each, which compile and record, then steps of a second, a pause between two of them."""
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(module, "peak_flops", lambda device: 4000.0)
    meter = Meter(8.0, torch.device("cpu"), world_size=2)
    waits = []

    def steps(count: int, seconds: float) -> None:
        for _ in range(count):
            now[0] += seconds
            meter.count(100, wait=lambda: waits.append(now[0]))

    now[0] += 30  # a validation that the previous launch skipped, for instance
    steps(1, 60)
    first = meter.read()
    assert (first["tokens_per_second"], first["mfu"], first["seconds"]) == (None, None, 90)
    steps(1, 60)
    assert waits == [90, 150], "the host waits for the device in the start-up only"
    steps(3, 1)
    assert meter.read()["tokens_per_second"] == pytest.approx(100)
    steps(2, 1)
    with meter.paused():
        now[0] += 500
    steps(2, 1)
    row = meter.read()
    assert row["tokens_per_second"] == pytest.approx(100) and row["mfu"] == pytest.approx(0.1)
    assert row["seconds"] == 157 and meter.rate == row["tokens_per_second"] and len(waits) == 2
