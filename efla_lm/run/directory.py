"""The run directory: one per launch, the same for all processes, written by one launch at a time.

    runs/NAME/config.yaml       resolved settings of the newest launch; config-1.yaml, ... of earlier ones that differ
    runs/NAME/launches.jsonl    one line per launch: time, host, process, world size, command, versions
    runs/NAME/metrics.jsonl     see `efla_lm.run.metrics`
    runs/NAME/checkpoints/      step-N folders; export/, results/
    runs/NAME/.lock             the process that writes here

The main process makes a new directory with an atomic mkdir and sends its name to the others; only it reads a clock.
"""

import contextlib
import errno
import fcntl
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from efla_data.atomic import naming, write_atomically
from efla_kernels.environment import installed_version

from efla_lm.errors import UserError
from efla_lm.settings import TrainSettings, to_yaml

Broadcast = Callable[[Any], Any]  # returns the main process's object on every process


class RunDirectory:
    """Paths of one run. `open_run` makes it; `close`, or the end of a `with`, releases the lock."""

    def __init__(self, path: Path, main: bool, is_new: bool, lock: "DirectoryLock | None" = None) -> None:
        self.path = path
        self.main = main  # whether this process writes the shared files
        self.is_new = is_new  # whether this launch made the directory
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.export = path / "export"
        self.results = path / "results"
        self._lock = lock

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.name

    def close(self) -> None:
        """Release the lock, so that another launch may write here. May be called more than once."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_run(
    settings: TrainSettings, *, rank: int = 0, world_size: int = 1, broadcast: Broadcast = lambda value: value
) -> RunDirectory:
    """Make or reopen the run directory of these settings. All processes of the launch call it and get the same path.

    `broadcast` sends an object of the main process to all, such as an error: all raise it, and none waits. Raises
    UserError if another launch writes there, or if resume=never and the directory holds a run.
    """
    message: dict[str, Any] = {}
    lock: DirectoryLock | None = None
    if rank == 0:
        try:
            path, is_new, lock = _make(settings)
            message = {"path": str(path), "is_new": is_new}
            _record(path, settings, world_size)
        except (UserError, OSError) as error:
            if lock is not None:
                lock.release()
            message = {"error": str(error), "errno": None}
            if isinstance(error, OSError):
                message |= {"error": error.strerror, "errno": error.errno, "filename": error.filename}
    message = broadcast(message)
    if "error" in message:
        if message["errno"] is not None:
            raise OSError(message["errno"], message["error"], message["filename"])
        raise UserError(message["error"])
    path = Path(message["path"])
    path.mkdir(parents=True, exist_ok=True)  # another node may have another file system
    return RunDirectory(path, rank == 0, message["is_new"], lock)


def _make(settings: TrainSettings) -> tuple[Path, bool, "DirectoryLock"]:
    runs = Path(settings.runs_dir)
    runs.mkdir(parents=True, exist_ok=True)
    if settings.name is None:
        path = _new_directory(runs, f"{settings.model.mixer}-{settings.size.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        return path, True, DirectoryLock(path)
    path = runs / settings.name
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
        return path, True, DirectoryLock(path)
    if not path.is_dir():
        raise UserError(f"name: {path} is a file, expected a folder; choose another name")
    lock = DirectoryLock(path)
    if settings.resume == "never" and _holds_run(path):
        lock.release()
        raise UserError(f"name: {path} already holds a run and resume=never; choose another name, or resume=auto")
    return path, False, lock


def _new_directory(runs: Path, name: str) -> Path:
    """mkdir is atomic: several launches in one second get different names."""
    for number in range(1, 10_000):
        path = runs / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise UserError(f"name: thousands of runs are called {name}; choose a name")


def _holds_run(path: Path) -> bool:
    checkpoints = path / "checkpoints"
    return (path / "metrics.jsonl").exists() or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _record(path: Path, settings: TrainSettings, world_size: int) -> None:
    """Write config.yaml (keeping an earlier one that differs) and add a line to launches.jsonl."""
    config, text = path / "config.yaml", to_yaml(settings)
    if config.exists() and config.read_text() != text:
        number = next(n for n in range(1, 100_000) if not (path / f"config-{n}.yaml").exists())
        config.rename(path / f"config-{number}.yaml")
    write_atomically(config, text)
    launch = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world_size": world_size,
        "command": sys.argv,
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in ("efla-lm", "torch", "transformers", "triton")},
    }
    launches = path / "launches.jsonl"
    with naming(launches), open(launches, "a", encoding="utf-8") as file:
        file.write(json.dumps(launch) + "\n")


class DirectoryLock:
    """The exclusive right to write in a directory, from construction to `release` or the end of the process.

    The kernel's lock on `.lock` decides between processes of one host. It ends with its holder, so a killed launch
    blocks no other. The text of the file (host, pid, start time) decides on file systems that do not share locks
    between hosts. Raises UserError with the name of the holder.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / ".lock"
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire()
        except BaseException:
            os.close(self._file)
            raise

    def _acquire(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(self._in_use(self._read())) from None
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        holder = self._read()
        if holder and _may_be_alive(holder):
            raise UserError(self._in_use(holder))
        me = {"host": socket.gethostname(), "pid": os.getpid(), "started": _process_start(os.getpid())}
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(me).encode(), 0)
        os.fsync(self._file)

    def release(self) -> None:
        """Empty and unlock the file. It is not removed: two later launches could then lock two different files."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.close(self._file)  # this ends the kernel's lock
            self._file = -1

    def _read(self) -> dict[str, Any]:
        try:
            holder = json.loads(os.pread(self._file, 4096, 0) or b"{}")
        except ValueError:
            return {}
        return holder if isinstance(holder, dict) else {}

    def _in_use(self, holder: dict[str, Any]) -> str:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'this host')}"
        return (
            f"{self.path.parent}: another launch ({who}) is writing here; wait for it or choose another name "
            f"(if that process is gone, delete {self.path})"
        )


def _may_be_alive(holder: dict[str, Any]) -> bool:
    """Whether the holder may still run. It does not if its pid is free here, or belongs to a later process."""
    if holder.get("host") != socket.gethostname():
        return True
    try:
        pid = int(holder["pid"])
        os.kill(pid, 0)
    except (ProcessLookupError, KeyError, ValueError, TypeError):
        return False
    except PermissionError:
        pass
    started = _process_start(pid)
    return started is None or holder.get("started") is None or started == holder["started"]


def _process_start(pid: int) -> str | None:
    """Start time of a process in clock ticks since boot, with the boot's id; None without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{boot}:{stat.rpartition(')')[2].split()[19]}"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory during a `with`, for commands other than training that write into a run."""
    lock = DirectoryLock(directory)
    try:
        yield
    finally:
        lock.release()
