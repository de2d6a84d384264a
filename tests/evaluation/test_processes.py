"""Several processes share the requests of one evaluation and give the numbers of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import eval as command
from tests.evaluation.material import local_file, save_export, write_task_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(180)
def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    export, data = save_export(tmp_path / "export"), write_task_files(tmp_path / "data")
    few = local_file(data, "sciq")  # fewer documents than processes
    few.write_text(few.read_text().splitlines()[0] + "\n")

    def arguments(name: str) -> list[str]:
        return [f"checkpoint={export}", f"tasks.local_dir={data}", f"out={tmp_path / name}", "device=cpu"]

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = subprocess.run(
        [*launch, "eval.py", *arguments("two")], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("result: ") == 1
    assert command.main.run(arguments("one")) == 0

    found = {}
    for name in ("one", "two"):
        (path,) = (tmp_path / name).glob("*.json")  # written by one process alone
        found[name] = json.loads(path.read_text())
    assert found["two"]["evaluation"]["processes"] == 2
    assert found["two"]["results"]["sciq"]["sample_len"] == 1
    for task, numbers in found["one"]["results"].items():
        for metric, value in numbers.items():
            expected = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            assert found["two"]["results"][task][metric] == expected, (task, metric)
