"""The run directory: one per launch, agreed by all processes, written by one launch at a time.

    runs/NAME/config.yaml       resolved settings of the newest launch; config-1.yaml, ... of earlier ones that differ
    runs/NAME/launches.jsonl    one line per launch: time, host, process, world size, command, versions
    runs/NAME/metrics.jsonl     see `efla_lm.run.metrics`
    runs/NAME/checkpoints/      step-N folders; export/, results/
    runs/NAME/.lock             who writes here now

A new name is made by the main process with an atomic mkdir and told to the others; only it reads a clock.
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

from efla_kernels.environment import installed_version

from efla_lm.errors import UserError
from efla_lm.settings import TrainSettings, to_yaml

Broadcast = Callable[[Any], Any]  # the main process's object, on every process


class RunDirectory:
    """Paths of one run. `open_run` makes it; `close` (or leaving a `with`) gives the lock back."""

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
        """Let other launches in. May be called more than once."""
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
    """Make or reopen the run directory of these settings; every process of the launch calls it and gets the same path.

    `broadcast` hands the main process's object to all (e.g. through torch.distributed); an error on the main process is
    handed round too, so that all raise it and none waits. Raises UserError when another launch writes there, or when
    `resume=never` meets a directory that holds a run.
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
    """mkdir is atomic: of several launches in one second each gets a name of its own."""
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


def write_atomically(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path), open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of writing into an open file say which one: the system's name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


class DirectoryLock:
    """Exclusive right to write in a directory, from construction to `release` or the end of the process.

    The kernel's lock on `.lock` decides between processes of one host and vanishes with its holder, so that a killed
    launch blocks nobody; the text in it (host, pid, start time) decides where the file system does not carry locks
    between hosts. Raises UserError naming the holder.
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
        """Empty the file and unlock it. The file stays: removing it would let two later launches lock two files."""
        if self._file >= 0:
            os.ftruncate(self._file, 0)
            os.close(self._file)  # the kernel's lock goes with it
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
    """Whether the named process may still run: surely not if its pid is free here, or belongs to a later process."""
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
    """Start time of a process in clock ticks since boot, with the boot's id; null where /proc has none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{boot}:{stat.rpartition(')')[2].split()[19]}"


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock for the length of a `with` (for commands other than training that write into a run)."""
    lock = DirectoryLock(directory)
    try:
        yield
    finally:
        lock.release()
