"""What a run reports: rows of metrics.jsonl and trackers, lines of progress, and the sequences of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from efla_data.loader.batches import Batch

from efla_lm.parallel.distributed import World
from efla_lm.run.batch_log import BatchLog
from efla_lm.run.directory import RunDirectory
from efla_lm.run.metrics import MetricsWriter
from efla_lm.run.progress import Progress
from efla_lm.settings import TrainSettings, to_dict

Row = Mapping[str, int | float | None]


class RunLog:
    """A context manager. All ranks have one; the main process writes.

    steps: of the whole run. resumed_step: the step where this launch begins. on_failure: called with the error of a
    row that cannot be written.
    """

    def __init__(
        self,
        directory: RunDirectory,
        settings: TrainSettings,
        world: World,
        steps: int,
        resumed_step: int,
        on_failure: Callable[[OSError], None],
    ) -> None:
        log_batches, path = settings.train.log_batches, directory.path / "batches.jsonl"
        self._batches = BatchLog(path, world, resumed_step) if log_batches else None
        config = to_dict(settings)
        self._metrics = MetricsWriter(directory, settings.logger, resumed_step=resumed_step, config=config)
        self._progress = Progress(steps, start_step=resumed_step, main=world.is_main)
        self._on_failure = on_failure
        self.message = self._progress.message

    def __enter__(self) -> RunLog:
        self._progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.__exit__(*exc)
        self._metrics.close()

    def batches(self, step: int, batches: Sequence[Batch]) -> None:
        """Record the sequences of `step` (from 0), with train.log_batches=true; all ranks call it."""
        if self._batches is not None:
            self._batches.write(step, batches)

    def step(self, step: int, loss: float, lr: float, rate: float | None) -> None:
        """Show a step that has no row in metrics.jsonl. rate: tokens per second."""
        self._progress.update(step, loss=loss, lr=lr, tokens_per_second=rate, log=False)

    def row(self, row: Row, rate: float | None) -> None:
        """Write and show the row of a step."""
        self._write(row)
        self._progress.update(row["step"], loss=row["loss"], lr=row["lr"], tokens_per_second=rate)  # type: ignore

    def measured(self, step: int, row: Row) -> None:
        """Write and show a validation loss or metrics of tasks."""
        self._write({"step": step, **row})
        self._progress.measured(step, row)

    def _write(self, row: Row) -> None:
        try:
            self._metrics.write(row)
        except OSError as error:
            self._on_failure(error)
