"""Preparation that is interrupted, disturbed or run twice at once: nothing is lost, repeated or mixed up."""

from __future__ import annotations

import fcntl
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from efla_data.corpus import prepare as module
from efla_data.corpus import sources
from efla_data.corpus.prepare import prepare
from efla_data.corpus.progress import Progress, Watcher
from efla_data.corpus.recipe import Recipe
from efla_data.errors import DataError

from tests.data.material import contents, fingerprints, jsonl, many_texts


def run_killed_after(recipe: Recipe, out: Path, chunks: int, chunk_bytes: int) -> None:
    """`prepare` with 2 processes in a process of its own, killed when so many chunks are finished."""
    code = (
        "import json, sys\n"
        "from efla_data.corpus import sources\n"
        "from efla_data.corpus.prepare import prepare\n"
        "from efla_data.corpus.recipe import Recipe\n"
        f"sources.SMALLEST_CHUNK = {chunk_bytes}\n"
        f"prepare(Recipe.from_dict(json.loads(sys.argv[1])), sys.argv[2], processes=2)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(recipe.to_dict()), str(out)])
    try:
        partial = out.with_name(out.name + ".partial")
        deadline = time.monotonic() + 60
        while len(list((partial / "chunks").glob("??????.json"))) < chunks:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(180)
def test_killed_run_goes_on_where_it_was(corpus: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "SMALLEST_CHUNK", 20_000)
    folder = Path(corpus.sources[0])
    for n in range(8):
        (folder / f"more{n}.jsonl").write_bytes(jsonl(many_texts(2000, seed=10 + n)))
    run_killed_after(corpus, tmp_path / "out", 3, sources.SMALLEST_CHUNK)
    assert not (tmp_path / "out").exists()
    finished = sorted((tmp_path / "out.partial" / "chunks").glob("??????.json"))
    times = {path: path.stat().st_mtime_ns for path in finished}
    assert 3 <= len(finished) < len(sources.plan_chunks(corpus))
    seen: list[Progress] = []
    renewed: list[Path] = []

    def show(progress: Progress) -> None:
        seen.append(progress)
        renewed.extend(path for path, then in times.items() if path.stat().st_mtime_ns != then)

    resumed = prepare(corpus, tmp_path / "out", processes=1, show=show)
    assert not renewed
    assert not (tmp_path / "out.partial").exists()
    assert seen[-1].chunks <= len(sources.plan_chunks(corpus)) - len(finished)
    assert seen[-1].fraction == 1
    straight = prepare(corpus, tmp_path / "straight", processes=1)
    assert fingerprints(resumed) == fingerprints(straight)
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_what_another_plan_left_is_not_used(corpus: Recipe, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    (partial / "chunks").mkdir(parents=True)
    (partial / "plan.json").write_text("{}")
    (partial / "tokenizer_info.json").write_text("{}")
    (partial / "chunks" / "000000.json").write_text("{}")
    assert fingerprints(prepare(corpus, tmp_path / "out", processes=1)) == fingerprints(
        prepare(corpus, tmp_path / "clean", processes=1)
    )


def test_a_partial_folder_of_something_else_is_left_alone(corpus: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("half of it")
    with pytest.raises(DataError, match="was not left by an earlier run"):
        prepare(corpus, tmp_path / "out")
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "half of it"


def test_half_written_units_are_removed(corpus: Recipe, tmp_path: Path) -> None:
    """A chunk counts when its JSON is there, and what a killed worker was writing does not stay on the disk."""
    broken = Recipe.from_dict({**corpus.to_dict(), "sources": [*corpus.sources, str(tmp_path / "bad.jsonl.gz")]})
    (tmp_path / "bad.jsonl.gz").write_bytes(gzip.compress(jsonl(many_texts(200, seed=9)))[:-9])
    for _ in range(2):
        with pytest.raises(DataError, match="truncated"):
            prepare(broken, tmp_path / "out", processes=1)
    left = [path.name.split(".")[1] for path in (tmp_path / "out.partial" / "chunks").iterdir()]
    assert sum(name.isdigit() for name in left) == 4  # of the last attempt: two files for each of two splits


def test_two_at_once_in_one_folder_are_refused(corpus: Recipe, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial" / "lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare(corpus, tmp_path / "out")
    prepare(corpus, tmp_path / "out", processes=1)


def test_workers_that_outlive_their_run_are_waited_for(
    corpus: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are writing belongs to the same chunks."""
    import threading

    (tmp_path / "out.partial").mkdir()
    with open(tmp_path / "out.partial" / "workers.lock", "w") as worker:
        fcntl.flock(worker, fcntl.LOCK_SH)
        with monkeypatch.context() as patch, pytest.raises(DataError, match="another process is preparing"):
            patch.setattr(module, "WORKERS_WAIT", 0.1)
            prepare(corpus, tmp_path / "out", processes=1)
        assert not (tmp_path / "out.partial" / "chunks").exists()
        threading.Timer(0.5, lambda: fcntl.flock(worker, fcntl.LOCK_UN)).start()
        start = time.monotonic()
        prepare(corpus, tmp_path / "out", processes=1)
        assert time.monotonic() - start > 0.4


@pytest.mark.timeout(120)
def test_error_in_a_worker_names_its_file_and_keeps_what_is_finished(corpus: Recipe, tmp_path: Path) -> None:
    path = Path(corpus.sources[0]) / "3.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    for processes in (1, 2):
        with pytest.raises(DataError, match=r"3\.jsonl\.gz: truncated or damaged gz file"):
            prepare(corpus, tmp_path / "out", processes=processes)
        assert not (tmp_path / "out").exists()
        assert list((tmp_path / "out.partial" / "chunks").glob("*.json"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_death_of_a_worker_is_told(
    corpus: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int
) -> None:
    """One clear message, no worker left behind, and the next run completes the work."""
    before = multiprocessing.active_children()
    kill_one = iter([True])

    def show(progress: Progress) -> None:
        if next(kill_one, False):
            worker = next(child for child in multiprocessing.active_children() if child not in before)
            os.kill(worker.pid or 0, signum)

    with pytest.raises(DataError, match="a worker process was killed or crashed, perhaps for want of memory") as caught:
        prepare(corpus, tmp_path / "out", processes=2, show=show)
    assert "\n" not in str(caught.value) and "finished parts are kept, run the command again" in str(caught.value)
    assert multiprocessing.active_children() == before
    assert fingerprints(prepare(corpus, tmp_path / "out", processes=2)) == fingerprints(
        prepare(corpus, tmp_path / "clean", processes=1)
    )


@pytest.mark.timeout(120)
def test_workers_end_with_their_run_and_import_no_main_module(corpus: Recipe, tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"` works; its workers do not run it; a killed run leaves no worker."""
    for n in range(8):
        (Path(corpus.sources[0]) / f"more{n}.jsonl").write_bytes(jsonl(many_texts(4000, seed=10 + n)))
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "print('main', flush=True)\n"
        "from efla_data.corpus import sources\n"
        "from efla_data.corpus.prepare import prepare\n"
        "from efla_data.corpus.recipe import Recipe\n"
        "sources.SMALLEST_CHUNK = 20_000\n"
        "prepare(Recipe.from_dict(json.loads(sys.argv[1])), sys.argv[2], processes=2)\n"
    )
    command = [sys.executable, str(script), json.dumps(corpus.to_dict()), str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    chunks = tmp_path / "out.partial" / "chunks"
    while len(list(chunks.glob("??????.json"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    with open(tmp_path / "out.partial" / "workers.lock", "w") as handle:  # workers hold it shared
        deadline = time.monotonic() + 10
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "a worker outlived its run"
                time.sleep(0.05)
    assert process.stdout is not None and process.stdout.read() == "main\n"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "main\n", done.stderr


@pytest.mark.timeout(120)
def test_interrupt_ends_the_workers(corpus: Recipe, tmp_path: Path) -> None:
    before = multiprocessing.active_children()

    def show(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "out", processes=2, show=show)
    assert multiprocessing.active_children() == before


def test_progress_estimates() -> None:
    """Half of the text read is about half of the time, before any large chunk ends and after a resume."""
    seen: list[Progress] = []
    watcher = Watcher([10, 90, 100, 500], None, seen.append, interval=0)
    watcher.skip(3, 1)
    watcher.report(20, 5)
    assert seen[-1].fraction == 0 and seen[-1].seconds_left is None
    watcher.finish(0, 20)  # 2 bytes of text per byte on disk: 400 in all
    watcher.report(180, 45)
    assert seen[-1].fraction == pytest.approx(0.5)
    assert (seen[-1].chunks_done, seen[-1].chunks, seen[-1].text_bytes, seen[-1].tokens) == (1, 3, 200, 50)
    watcher.report(10_000, 1)
    assert seen[-1].fraction == 0.99  # an estimate never claims to be the end
    watcher.finish(1, 180)
    watcher.finish(2, 10_000)
    assert seen[-1].fraction == 1 and seen[-1].seconds_left == 0
    budget = Watcher([1000, 1000], 100, seen.append, interval=0)
    budget.report(500, 25)
    assert seen[-1].fraction == pytest.approx(0.25)
