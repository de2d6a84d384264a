"""One directory per launch, one launch per directory."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from efla_data.atomic import write_atomically

from efla_lm.errors import UserError
from efla_lm.run.directory import DirectoryLock, locked, open_run
from efla_lm.settings import TrainSettings, compose, load_settings

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def settings_in(folder: Path, *overrides: str) -> TrainSettings:
    return compose("train", [f"runs_dir={folder}", *overrides], TrainSettings)


def test_new_names_never_collide(tmp_path):
    """Many launches in one second, from several threads: each gets a directory of its own."""
    settings = settings_in(tmp_path)
    paths, threads = [], []
    for _ in range(8):
        threads.append(threading.Thread(target=lambda: paths.append(open_run(settings).path)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 8
    assert sorted(paths) == sorted(tmp_path.iterdir())
    assert all(path.name.startswith("efla-tiny-20") for path in paths)


def test_config_and_launch_are_recorded(tmp_path):
    settings = settings_in(tmp_path, "name=a")
    with open_run(settings, world_size=2) as run:
        assert run.is_new and run.name == "a"
        assert load_settings(run.path / "config.yaml", TrainSettings) == settings
    again = settings_in(tmp_path, "name=a", "train.log_every=5")
    with open_run(again) as run:
        assert not run.is_new
    with open_run(again):
        pass
    assert load_settings(tmp_path / "a/config.yaml", TrainSettings) == again
    assert load_settings(tmp_path / "a/config-1.yaml", TrainSettings) == settings
    assert not (tmp_path / "a/config-2.yaml").exists()
    launches = [json.loads(line) for line in (tmp_path / "a/launches.jsonl").read_text().splitlines()]
    assert [launch["world_size"] for launch in launches] == [2, 1, 1]
    assert launches[0]["pid"] == os.getpid()


def test_second_writer_is_refused_and_first_untouched(tmp_path):
    with open_run(settings_in(tmp_path, "name=a", "seed=1")) as run:
        before = (run.path / "config.yaml").read_text()
        with pytest.raises(UserError, match=rf"process {os.getpid()} on .*choose another name"):
            open_run(settings_in(tmp_path, "name=a", "seed=2"))
        assert (run.path / "config.yaml").read_text() == before
    open_run(settings_in(tmp_path, "name=a", "seed=2")).close()


def hold_lock(folder: Path) -> subprocess.Popen:
    code = f"""
        import time
        from pathlib import Path
        from efla_lm.run.directory import DirectoryLock
        lock = DirectoryLock(Path({str(folder)!r}))
        print("held", flush=True)
        time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, env=ENV
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.mark.timeout(120)
def test_lock_of_a_killed_process_is_taken_over(tmp_path):
    holder = hold_lock(tmp_path)
    with pytest.raises(UserError, match=f"process {holder.pid} "):
        DirectoryLock(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == holder.pid  # it had no chance to clean up
    with locked(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / ".lock").read_text() == ""


@pytest.mark.parametrize(
    ("holder", "free"),
    [
        ({"host": os.uname().nodename, "pid": 2**22 + 1, "started": "x"}, True),  # no such process
        (
            {"host": os.uname().nodename, "pid": os.getpid(), "started": "another boot:1"},
            True,
        ),  # its pid was given anew
        ({"host": "elsewhere", "pid": 1, "started": "x"}, False),  # cannot be looked at from here
        ("not a lock", True),
    ],
)
def test_text_of_the_lock_decides_where_the_kernel_cannot(tmp_path, holder, free):
    (tmp_path / ".lock").write_text(json.dumps(holder))
    if free:
        DirectoryLock(tmp_path).release()
    else:
        with pytest.raises(UserError, match=r"elsewhere.*delete .*\.lock"):
            DirectoryLock(tmp_path)


def test_live_process_blocks_without_the_kernels_lock(tmp_path, monkeypatch):
    """A file system that knows no locks: the pid and start time in the file must do."""
    import errno
    import fcntl

    def unsupported(*_):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = DirectoryLock(tmp_path)
    with pytest.raises(UserError, match=f"process {os.getpid()} "):
        DirectoryLock(tmp_path)
    lock.release()
    DirectoryLock(tmp_path).release()


def test_never_resume_does_not_touch_an_old_run(tmp_path):
    open_run(settings_in(tmp_path, "name=a", "resume=never")).close()
    open_run(settings_in(tmp_path, "name=a", "resume=never")).close()  # nothing was written yet: fine
    (tmp_path / "a/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"already holds a run.*choose another name"):
        open_run(settings_in(tmp_path, "name=a", "resume=never"))
    open_run(settings_in(tmp_path, "name=a")).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_run(settings_in(tmp_path, "name=file"))


def test_all_ranks_hear_of_the_main_ones_error(tmp_path):
    """An error before the broadcast would leave the other processes waiting."""
    with open_run(settings_in(tmp_path, "name=a")):
        sent = []
        with pytest.raises(UserError):
            open_run(settings_in(tmp_path, "name=a"), broadcast=lambda value: sent.append(value) or value)
        with pytest.raises(UserError, match="another launch"):
            open_run(settings_in(tmp_path, "name=a"), rank=1, world_size=2, broadcast=lambda _: sent[0])


def test_unwritable_place_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file") as caught:
        open_run(settings_in(tmp_path / "file"))
    assert caught.value.filename == str(tmp_path / "file") and str(caught.value).count("Errno") == 1
    with pytest.raises(OSError, match="name too long"):
        open_run(settings_in(tmp_path, "name=" + "x" * 300))


def test_interrupted_write_leaves_the_old_text(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


WORKER = """
    import sys
    import torch.distributed as dist
    from efla_lm.settings import TrainSettings, compose, to_dict
    from efla_lm.run.metrics import MetricsWriter
    from efla_lm.run.directory import open_run

    def broadcast(value):
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = compose("train", [f"runs_dir={sys.argv[1]}", "logger=wandb"], TrainSettings)
    with open_run(settings, rank=rank, world_size=size, broadcast=broadcast) as run:
        with MetricsWriter(run, settings.logger, config=to_dict(settings)) as metrics:
            for step in (1, 2):
                metrics.write({"step": step, "loss": 1.0})
        (run.path / f"seen-by-{rank}").touch()
    dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_three_launches_of_two_processes(tmp_path):
    """Each launch has one directory, one config, one metrics file and one tracker run; without network or key."""
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    runs = tmp_path / "runs"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
        str(runs),
    ]
    env = {k: v for k, v in ENV.items() if k != "WANDB_API_KEY"} | {"HOME": str(tmp_path)}
    launches = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for launch in launches:
        _, error = launch.communicate(timeout=170)
        assert launch.returncode == 0, error
    assert len(list(runs.iterdir())) == 3
    for run in runs.iterdir():
        assert sorted(path.name for path in run.glob("seen-by-*")) == ["seen-by-0", "seen-by-1"]
        assert len(list(run.glob("config*.yaml"))) == 1
        assert (run / "metrics.jsonl").read_text().count("\n") == 2
        assert len(list(run.glob("wandb/*run-*-*"))) == 1
