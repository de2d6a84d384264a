"""`RUN/batches.jsonl`: the ids of the sequences of each step (train.log_batches=true), to check the order of data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from efla_data.loader.batches import Batch

from efla_lm.parallel.distributed import World


class BatchLog:
    """One row per step: `window_ids` in the order of the global batch, and `by_rank`, the share of each rank."""

    def __init__(self, path: Path, world: World, start_step: int) -> None:
        self._world = world
        if world.is_main:
            rows = path.read_text().splitlines() if path.exists() else []
            kept = [row for row in rows if row.endswith("}") and json.loads(row)["step"] < start_step]
            path.write_text("".join(row + "\n" for row in kept))  # the run takes later steps again
            self._stream = path.open("a", buffering=1)

    def write(self, step: int, batches: Sequence[Batch]) -> None:
        """Write the row of `step` (from 0). All ranks call it."""
        ranks = self._world.gather([batch.sequence_ids.tolist() for batch in batches])
        if self._world.is_main:
            row = {
                "step": step,
                "window_ids": [one for micro in zip(*ranks, strict=True) for part in micro for one in part],
                "by_rank": [[window for part in parts for window in part] for parts in ranks],
            }
            self._stream.write(json.dumps(row) + "\n")
