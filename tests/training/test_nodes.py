"""Several nodes, here two torchrun agents on one machine over gloo: stopped, killed, queued again, the same run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from efla_lm.run.metrics import read_rows
from tests.training.launch import ROOT, arguments, consumed, metrics, run_here

STEPS = 60
SETTINGS = (f"train.steps={STEPS}", "train.save_every=5", "parallel=hsdp", "parallel.shard=1")

pytestmark = pytest.mark.timeout(300)


def environment(**more: str) -> dict[str, str]:
    """What SLURM would set, and the interpreter of this test as `python`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "ACCELERATE_", "MASTER_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), clean.get("PATH", "")])
    ours = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
    return {**clean, "PATH": path, "PYTHONPATH": ours, "OMP_NUM_THREADS": "1", "PROCESSES": "1",
            "HEAD_NODE": "localhost", "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", **more}  # fmt: skip


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return str(probe.getsockname()[1])


def start_nodes(overrides: list[str], output: Path) -> list[subprocess.Popen[bytes]]:
    port = free_port()
    with output.open("ab") as stream:
        return [
            subprocess.Popen(
                ["bash", "scripts/slurm/node.sh", *overrides], cwd=ROOT, stdout=stream, stderr=stream,
                env=environment(RENDEZVOUS_PORT=port, SLURM_RESTART_COUNT=port), start_new_session=True,
            )
            for _ in range(2)
        ]  # fmt: skip


def wait_for(reached: Callable[[], bool], output: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.05)


def logged(runs: Path) -> int:
    """The newest step in metrics.jsonl."""
    path = runs / "run" / "metrics.jsonl"
    return max((row["step"] for row in read_rows(path) if "loss" in row), default=0) if path.exists() else 0


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(descendant for child in children for descendant in family(int(child)))]


def test_one_node_stopped_one_killed(corpus: Path, tmp_path: Path) -> None:
    """Told to stop, all nodes save and leave with 0; when a node dies, the other fails; the run goes on each time."""
    runs, output = tmp_path / "nodes", tmp_path / "output.txt"
    overrides = arguments(corpus, runs, "name=run", *SETTINGS)
    nodes = start_nodes(overrides, output)
    wait_for(lambda: logged(runs) >= 7, output)
    nodes[1].send_signal(signal.SIGUSR1)
    assert [node.wait(60) for node in nodes] == [0, 0], output.read_text()
    stopped_at = logged(runs)
    assert 7 <= stopped_at < STEPS
    assert (runs / "run" / "checkpoints" / f"step-{stopped_at}").is_dir()

    nodes = start_nodes(overrides, output)
    wait_for(lambda: logged(runs) >= stopped_at + 7, output)
    for process in reversed(family(nodes[1].pid)):
        os.kill(process, signal.SIGKILL)
    assert nodes[0].wait(120) != 0, output.read_text()
    nodes[1].wait(10)

    nodes = start_nodes(overrides, output)
    assert [node.wait(120) for node in nodes] == [0, 0], output.read_text()
    assert run_here(corpus, tmp_path, "name=alone", f"train.steps={STEPS}") == 0
    assert consumed(runs, "run") == consumed(tmp_path, "alone")
    assert metrics(runs, "run") == pytest.approx(metrics(tmp_path, "alone"), rel=1e-5)
    assert len((runs / "run" / "launches.jsonl").read_text().splitlines()) == 3


def write_command(path: Path, text: str) -> None:
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def test_job_queues_again_until_it_is_done(corpus: Path, tmp_path: Path) -> None:
    """The job script with stand-ins of srun (one node) and scontrol: USR1 saves and queues again, the end does not."""
    commands, output, queue = tmp_path / "bin", tmp_path / "output.txt", tmp_path / "queue.txt"
    commands.mkdir()
    write_command(commands / "srun", 'shift\n"$@" &\ntask=$!\ntrap "kill -USR1 $task" USR1\nwait $task\nwait $task\n')
    write_command(commands / "scontrol", f'echo "$@" >> {queue}\n')
    overrides = arguments(corpus, tmp_path, f"train.steps={STEPS}")
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])

    def start_job() -> subprocess.Popen[bytes]:
        with output.open("ab") as stream:
            return subprocess.Popen(
                ["bash", "scripts/slurm/train.sbatch", *overrides], cwd=ROOT, stdout=stream, stderr=stream,
                env=environment(PATH=path, SLURM_JOB_NUM_NODES="1", RENDEZVOUS_PORT=free_port()),
                start_new_session=True,
            )  # fmt: skip

    job = start_job()
    rows = tmp_path / "slurm-77" / "metrics.jsonl"
    wait_for(lambda: rows.exists() and len(read_rows(rows)) >= 5, output)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0, output.read_text()
    assert queue.read_text() == "requeue 77\n"
    assert len(consumed(tmp_path, "slurm-77")) < STEPS
    assert start_job().wait(120) == 0, output.read_text()
    assert queue.read_text() == "requeue 77\n"
    assert len(consumed(tmp_path, "slurm-77")) == STEPS
    launches = [json.loads(line) for line in (tmp_path / "slurm-77" / "launches.jsonl").read_text().splitlines()]
    assert len(launches) == 2
