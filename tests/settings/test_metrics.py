"""Rows are whole, appear once, and need no network."""

import json
import math
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from efla_lm.errors import UserError
from efla_lm.run.directory import RunDirectory
from efla_lm.run.metrics import MetricsWriter, read_rows, truncate_rows
from efla_lm.settings import LoggerSettings

PLAIN = LoggerSettings()


def run_in(path: Path, main: bool = True) -> RunDirectory:
    path.mkdir(exist_ok=True)
    return RunDirectory(path, main, True)


def write(path: Path, steps: range, resumed_step: int = 0, logger: LoggerSettings = PLAIN, launch: str = "") -> None:
    with MetricsWriter(run_in(path), logger, resumed_step=resumed_step, config={"seed": 42}) as metrics:
        for step in steps:
            metrics.write({"step": step, "loss": 1 / step, "launch": launch})


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path / "metrics.jsonl")]


def test_resume_writes_no_step_twice(tmp_path):
    """Stopped at 25 with the newest checkpoint at 20, resumed twice."""
    write(tmp_path, range(1, 26), launch="a")
    write(tmp_path, range(21, 31), resumed_step=20, launch="b")
    write(tmp_path, range(31, 41), resumed_step=30, launch="c")
    assert steps_in(tmp_path) == list(range(1, 41))
    assert [row["launch"] for row in read_rows(tmp_path / "metrics.jsonl")] == ["a"] * 20 + ["b"] * 10 + ["c"] * 10


def test_start_over_clears_rows(tmp_path):
    write(tmp_path, range(1, 6))
    write(tmp_path, range(1, 3))
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    "tail", ['{"step": 3, "lo', '{"step": 3}', "\x00\x00\x00", "nonsense\n", "[1]\n", '{"loss": 1}\n']
)
def test_broken_tail_is_repaired(tmp_path, tail):
    """A line cut short must neither be read as a row nor be glued to the next one."""
    write(tmp_path, range(1, 3))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(tail)
    assert steps_in(tmp_path) == [1, 2]
    write(tmp_path, range(3, 5), resumed_step=2)
    assert steps_in(tmp_path) == [1, 2, 3, 4]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_untouched_when_nothing_is_dropped(tmp_path):
    write(tmp_path, range(1, 3))
    inode = (tmp_path / "metrics.jsonl").stat().st_ino
    truncate_rows(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").stat().st_ino == inode


def test_not_finite_is_null_and_json_stays_strict(tmp_path):
    with MetricsWriter(run_in(tmp_path), PLAIN, config={}) as metrics:
        metrics.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 1,
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
    }


def test_every_line_is_on_disk_at_once(tmp_path):
    metrics = MetricsWriter(run_in(tmp_path), PLAIN, config={})
    metrics.write({"step": 1})
    assert steps_in(tmp_path) == [1]  # before close: a kill here loses nothing
    metrics.close()
    metrics.close()


def test_only_the_main_process_writes(tmp_path):
    with MetricsWriter(
        run_in(tmp_path, main=False), LoggerSettings(wandb=True, tensorboard=True), config={}
    ) as metrics:
        metrics.write({"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_row_without_step_is_refused(tmp_path):
    with MetricsWriter(run_in(tmp_path), PLAIN, config={}) as metrics, pytest.raises(ValueError, match="step"):
        metrics.write({"loss": 1.0})


def test_full_disk_is_an_os_error(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with MetricsWriter(run_in(tmp_path), PLAIN, config={}) as metrics:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, metrics._file)
        os.close(full)
        with pytest.raises(OSError, match="No space left"):
            metrics.write({"step": 1})


def test_tensorboard_hides_what_is_written_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = LoggerSettings(tensorboard=True)
    write(tmp_path, range(1, 6), logger=logger)
    write(tmp_path, range(4, 7), resumed_step=3, logger=logger)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]


WANDB_LAUNCHES = """
    import sys
    import time
    from pathlib import Path
    from efla_lm.settings import LoggerSettings
    from efla_lm.run.metrics import MetricsWriter
    from efla_lm.run.directory import RunDirectory

    run, logger = RunDirectory(Path(sys.argv[1]), True, True), LoggerSettings(wandb=True, wandb_mode="offline")
    for first, last, resumed in ((1, 5, 0), (4, 8, 3), (9, 10, 8)):
        with MetricsWriter(run, logger, resumed_step=resumed, config={"seed": 42}) as metrics:
            for step in range(first, last + 1):
                metrics.write({"step": step, "loss": 1 / step})
        time.sleep(1.1)  # the tracker names its parts by the second
"""


@pytest.mark.timeout(180)
def test_offline_tracker_keeps_its_id_over_two_resumes(tmp_path):
    """No key, no network: one id, three parts, listed for a later upload."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")} | {"HOME": str(tmp_path)}
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-c", textwrap.dedent(WANDB_LAUNCHES), str(run)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    note = json.loads((run / "wandb.json").read_text())
    parts = [path.name for path in run.glob("wandb/offline-run-*")]
    assert len(parts) == 3
    assert all(part.endswith(f"-{note['id']}") for part in parts)
    assert note["parts"] == sorted(parts)
    assert "3 offline part(s)" in done.stdout and f"wandb sync --id {note['id']}" in done.stdout
    assert steps_in(run) == list(range(1, 11))


def test_tracker_plots_over_our_own_step(tmp_path, monkeypatch):
    """wandb ignores values of a step of its own that goes back, as it does after a resume from an older checkpoint."""
    calls = []

    class Tracked:
        def define_metric(self, name, **options):
            calls.append(("define", name, options))

        def log(self, row, **options):
            calls.append(("log", row, options))

        def finish(self):
            pass

    fake = types.SimpleNamespace(init=lambda **_: Tracked(), Settings=dict, errors=types.SimpleNamespace(Error=OSError))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first, resumed in ((1, 0), (2, 1)):
        write(tmp_path, range(first, 4), resumed_step=resumed, logger=LoggerSettings(wandb=True))
    launch = [("define", "step", {}), ("define", "*", {"step_metric": "step"})]
    assert [call for call in calls if call[0] == "define"] == launch * 2
    logged = [call for call in calls if call[0] == "log"]
    assert [row["step"] for _, row, _ in logged] == [1, 2, 3, 2, 3] and all(options == {} for *_, options in logged)


def test_unreadable_tracker_id_is_named(tmp_path):
    (tmp_path / "wandb.json").write_text("{")
    with pytest.raises(UserError, match=r"wandb\.json"):
        MetricsWriter(run_in(tmp_path), LoggerSettings(wandb=True), config={})


def test_disabled_tracker_writes_nothing(tmp_path):
    write(tmp_path, range(1, 3), logger=LoggerSettings(wandb=True, wandb_mode="disabled"))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
