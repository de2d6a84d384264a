"""Throughput of training on a CPU: the command with real points, what a failing point leaves, the clock, the report."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from efla_lm.errors import UserError
from efla_lm.settings import TrainSettings, compose
from scripts.plan import measured
from scripts.study import launcher
from scripts.throughput import __main__ as throughput
from scripts.throughput import forecast as train_forecast
from scripts.throughput import points
from scripts.throughput import report as train_report
from scripts.throughput.point import Point, measure, turn
from scripts.throughput.settings import ThroughputSettings

TINY = [
    "models=[efla]", "sizes=[tiny]", "shapes=[2x32]", "impls=[efla_lm]", "vocab_size=64", "device=cpu", "warmup=4",
    "windows=2", "updates=1", "train=['size.layers=1','schedule.peak=0.01','schedule.initial=0.01']",
]  # fmt: skip
COLUMNS = {"model", "size", "impl", "batch", "tokens", "gpus", "tokens_per_second", "mfu", "peak_gib", "startup_s",
           "loss", "commit", "parallel"}  # fmt: skip


def run(*arguments: str) -> int:
    return throughput.main.run([*TINY, *arguments], program="throughput")


def rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


@pytest.mark.timeout(180)
def test_points_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process and two; another option is another row; what is there stays; a peer that cannot run is said."""
    out = tmp_path / "speed.json"
    assert run(f"out={out}", "profile=1") == 0
    (one,) = rows(out)
    assert one["where"]["products"] > 0 and one["where"]["busy"] <= one["where"]["span"]
    assert set(one) >= COLUMNS
    assert one["tokens_per_second"] > 0 and one["mfu"] is None and one["peak_gib"] > 0
    assert one["startup_s"] > one["first_update_s"] > 0
    assert one["loss"] < 4.15 and one["loss_after"] == 7  # log 64 = 4.16 at the start
    assert run(f"out={out}", "gpus=2", "modes=[fsdp]") == 0
    assert run(f"out={out}", "models=[deltanet]", "impls=[fla]") == 1  # nothing measured
    first, two, peer = rows(out)
    assert first == one
    assert (two["gpus"], two["parallel"]) == (2, "fsdp") and two["loss"] < 4.15
    assert (peer["model"], peer["impl"]) == ("deltanet", "fla") and "needs a CUDA device" in peer["skipped"]
    capsys.readouterr()
    assert run(f"out={out}", "redo=false") == 0  # nothing left to do
    assert rows(out)[0] == one
    printed = capsys.readouterr().out
    assert "**tiny**" in printed and out.with_suffix(".png").stat().st_size > 0


@pytest.mark.timeout(180)
def test_points_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each figure is there once, whichever comes first; several GPUs have no such thing."""
    out = tmp_path / "speed.json"
    assert run(f"out={out}", "models=[efla,deltanet,mamba2]", "at_once=2") == 0
    found = rows(out)
    assert sorted(row["model"] for row in found) == ["deltanet", "efla", "mamba2"]
    assert all(row["tokens_per_second"] > 0 and row["at_once"] == row["windows"] == 2 for row in found)
    capsys.readouterr()
    assert run(f"out={out}", "at_once=2", "gpus=2") == 1
    assert "points of several GPUs run one after the other" in capsys.readouterr().err


def test_one_point_at_a_time_is_timed(tmp_path: Path) -> None:
    """Who is alone waits for those who compile, and they for him; among themselves they do not."""
    lock, seen = str(tmp_path / "turn"), []

    def second(alone: bool) -> None:
        with turn(lock, alone) as waited:
            seen.append(waited)

    for mine, other in ((True, True), (True, False), (False, True)):
        with turn(lock, mine) as waited, turn("", True) as nobody:
            thread = threading.Thread(target=second, args=(other,))
            thread.start()
            time.sleep(0.3)
            assert max(waited, nobody) < 0.2 and not seen
        thread.join()
        assert 0.2 < seen.pop() < 5
    with turn(lock, False), turn(lock, False) as waited:
        assert waited < 0.2


def test_a_turn_ends_though_a_process_was_forked_in_it(tmp_path: Path) -> None:
    """A child has the file open too: compilers and loaders of data may fork workers in a first update."""
    lock = str(tmp_path / "turn")
    with turn(lock, False):
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
    try:
        waited: list[float] = []
        thread = threading.Thread(target=lambda: waited.extend(_waited(lock)), daemon=True)
        thread.start()
        thread.join(10)
        assert waited and waited[0] < 5
    finally:
        child.kill()
        child.join()


def _waited(lock: str) -> Iterator[float]:
    with turn(lock, True) as seconds:
        yield seconds


def test_stopped_while_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind, nobody waits for it, and what was to come does not come."""
    started: list[subprocess.Popen[bytes]] = []
    begun = threading.Semaphore(0)

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **options: Any) -> None:
            begun.release()
            time.sleep(0.5 if started else 0.0)
            super().__init__(["sleep", "60"] if started else ["false"], **options)
            started.append(self)

    monkeypatch.setattr(launcher.subprocess, "Popen", Slow)
    settings = compose("throughput", [*TINY, "models=[efla,deltanet,mamba2,transformer]"], ThroughputSettings)
    begin = time.monotonic()
    found = points.run_all(settings, {})
    assert "skipped" in next(found)
    begun.acquire()
    begun.acquire()  # the second is on its way
    found.close()
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    assert time.monotonic() - begin < 30


def test_without_a_gpu_nothing_is_started_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(f"out={tmp_path}/speed.json", "device=auto") == 0
    assert "no accelerator found" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_size_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sizes=[340]") == 1
    assert "sizes=['340']: expected a list from 1b3, 340m, 50m, tiny" in capsys.readouterr().err


def test_a_point_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    out = tmp_path / "speed.json"
    assert run(f"out={out}", "limit_s=1") == 1
    (row,) = rows(out)
    assert row["skipped"] == "not done after 1 s" and "tokens_per_second" not in row


def test_other_machines_figures_are_not_mixed(tmp_path: Path) -> None:
    result = {"environment": {"gpu": "NVIDIA X", "torch": "1", "triton": "1"}, "rows": []}
    (tmp_path / "a.json").write_text(json.dumps(result))
    with pytest.raises(UserError, match="measured with torch 1, here it is 2"):
        throughput.opened(tmp_path / "a.json", {"gpu": "NVIDIA X", "torch": "2", "triton": "1"})


def test_settings_of_a_point_are_train_pys(tmp_path: Path) -> None:
    settings = ThroughputSettings(gpus=4, modes=["ddp"], train=["train.compile=false"], shapes=["8x2048"])
    plans = points.plans(settings)
    assert [p for p in plans if p.impl == "fla" and p.model == "efla"] == []
    assert [p.options for p in plans if p.impl == "fla"] == [()] * 8
    plan = next(p for p in plans if (p.model, p.size) == ("mamba2", "1b3"))
    composed = compose("train", plan.overrides(tmp_path, settings), TrainSettings)
    assert composed.train.batch_tokens == 8 * 2048 * 4 and composed.train.micro_batch == 8
    assert composed.train.steps == 8 + 1 + 3 * 10 and composed.train.tokens is None
    assert composed.model.num_hidden_layers == 48 and composed.model.hidden_size == 2048
    assert composed.train.compile is False and composed.parallel.mode == "ddp"


def test_errors_are_found_in_the_output() -> None:
    output = "Traceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n"
    assert launcher.last_error(output + "some warning\n") == "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"
    ranks = "[rank1]: x.UserError: no room\ntorch.distributed.elastic.ChildFailedError: \n=====\n"
    assert launcher.last_error(ranks) == "x.UserError: no room"
    assert launcher.last_error("Killed\n") == "Killed"


class Counted:
    """A subject that takes no time: what is asked of it."""

    parameters, flops, batch_tokens, world_size, is_main = 10, 70.0, 100, 2, True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[int | str] = []

    def step(self, number: int) -> None:
        self.asked.append(number)

    def settle(self) -> float:
        self.asked.append("settle")
        return 3.0


def test_clock_waits_at_marks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 1000, 2))
    monkeypatch.setattr("scripts.throughput.point.time.perf_counter", lambda: float(next(ticks)))
    monkeypatch.setattr("scripts.throughput.point.peak_flops", lambda _: 1e6)
    point = Point(
        "efla", "tiny", "efla_lm", 1, 100, 2, "auto", [], warmup=5, windows=2, updates=3, profile=0, peer_waits=True,
        started=0.0, lock="",
    )  # fmt: skip
    subject = Counted()
    row = measure(subject, point)
    # a processor is waited for at each mark, a GPU is not; update 5 is not counted
    spans = [4, 5, "settle", 6, 7, 8, "settle", 9, 10, 11, "settle", "settle"]
    assert subject.asked == [0, "settle", 1, 2, 3, "settle", *spans]
    assert row["tokens_per_second"] == 3 * 100 / 2
    assert row["mfu"] == pytest.approx(150 * 6 * 10 / 2e6) and row["mfu_with_mixing"] == pytest.approx(150 * 70 / 2e6)
    assert (row["loss"], row["loss_after"]) == (3.0, 12)


def made_up() -> dict[str, Any]:
    def row(model: str, impl: str, rate: float, peak: float, **more: Any) -> dict[str, Any]:
        base = {"model": model, "size": "340m", "impl": impl, "batch": 8, "tokens": 2048, "gpus": 1, "options": [],
                "parallel": "auto", "caches": "empty", "tokens_per_second": rate, "mfu": 0.4, "peak_gib": peak,
                "startup_s": 20.0, "loss": 5.0, "mfu_with_mixing": 0.41}  # fmt: skip
        return base | more

    environment = {"gpu": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3", "flash-linear-attention": "0.6.0"}
    figures = (("efla", "efla_lm", 160e3, 9.6), ("gated_efla", "efla_lm", 144e3, 10.0), ("deltanet", "fla", 50e3, 19.2))
    found = [row(*columns) for columns in figures]
    found.append(row("deltanet", "fla", 80e3, 19.2, options=["peer_waits=false"]))
    failed = {"model": "transformer", "size": "340m", "impl": "fla", "batch": 8, "tokens": 2048, "gpus": 1,
              "options": [], "parallel": "auto", "skipped": "ImportError: flash-attn"}  # fmt: skip
    return {"environment": environment, "gpu": "NVIDIA H200", "rows": [*found, failed]}


def test_report(tmp_path: Path) -> None:
    text = train_report.markdown(made_up())
    assert "| EFLA | 160.0, 0.40, 9.6 GiB, 20 s |" in text
    assert "- EFLA 8x2048: 3.20x fla's DeltaNet with 0.50 of its memory and 1.00 of its start-up" in text
    assert "2.00x fla's DeltaNet [peer_waits=false] with 0.50" in text
    assert "0.900 of EFLA's speed" in text
    assert "- 340m Transformer (fla) 8x2048: ImportError: flash-attn" in text
    assert "apart" not in text
    result = made_up()
    result["rows"][0]["commit"] = "abc1234"
    assert "1.00 of its start-up (apart: abc1234, None)" in train_report.markdown(result)
    train_report.plot(made_up(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0


def test_report_of_several_gpus_and_the_forecast(tmp_path: Path) -> None:
    """Speed of each GPU beside one GPU's, whatever the sum's option; the forecast leaves the row itself out."""
    result = made_up() | {"settings": {"vocab_size": 32000}}
    efla = result["rows"][0]
    where = {"span": 220.0, "idle": 2.0, "exposed communication": 3.5}
    two = {"gpus": 2, "parallel": "ddp", "tokens_per_second": 304e3, "options": ["parallel.overlap=false"]}
    result["rows"] = [efla, efla | two | {"where": where}]
    text = train_report.markdown(result)
    assert "2 GPUs ddp: 0.950 of one GPU's speed each, 9.6 GiB each, of 220.0 ms traced 3.5 communication" in text
    path = tmp_path / "throughput_h200.json"
    path.write_text(json.dumps(result))
    one, both = train_forecast.forecasts(path, result)
    assert "assumed: MFU 0.4" in one["source"] and both["source"].endswith("8 x 2048 on 1 x NVIDIA H200")
    assert both["rate"] == pytest.approx(2 * 0.95 * 160e3)
    assert one["peak_gib"] == both["peak_gib"] == pytest.approx(16.4, abs=0.5)  # each holds all
    table = train_report.forecast_table(path, result)
    assert "| 304,000 | 304,000 | +0 % |" in table
    assert train_report.forecast_table(path, result | {"gpu": None}) == ""


def test_the_forecast_reads_the_file(tmp_path: Path) -> None:
    """Rows with options of their own are another recipe's."""
    result = made_up()
    result["rows"].append(result["rows"][0] | {"options": ["train.compile=false"], "tokens_per_second": 1.0})
    result["rows"].reverse()
    (tmp_path / "throughput_h200.json").write_text(json.dumps(result))
    speed = measured.device_speed(
        "efla", "340m", "h200-141gb", micro_tokens=16384, context=2048, flops_per_token=2e9, folder=tmp_path
    )
    assert speed.tokens_per_second == 160e3 and speed.is_measured
    other = measured.device_speed(
        "efla", "340m", "a100-80gb", micro_tokens=16384, context=2048, flops_per_token=2e9, folder=tmp_path
    )
    assert other.tokens_per_second == pytest.approx(0.41 * 312e12 / 2e9)
