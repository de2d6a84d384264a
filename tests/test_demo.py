"""How the demo ends when one of its commands does not: with a line and an exit code, and nothing cut off."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from scripts import demo

ROOT = Path(__file__).resolve().parents[1]


def test_a_failing_command_ends_the_demo_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.command("-c", "raise SystemExit(3)")
    assert stop.value.code == 3
    assert "exit code 3" in capsys.readouterr().out


def test_training_that_was_stopped_is_not_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On SIGTERM training saves and ends with exit code 0, but there is no export."""
    typed: list[str] = []
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "command", lambda *words: typed.append(words[0]) or 0.0)
    with pytest.raises(SystemExit) as stop:
        demo.main()
    assert stop.value.code == 1
    assert typed == ["-m", "train.py"]
    assert "training was stopped" in capsys.readouterr().out


def test_the_table_names_whole_paths_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def made(*words: str) -> float:
        if words[0] == "train.py":
            run = tmp_path / "runs" / words[-1].removeprefix("name=")
            (run / "export").mkdir(parents=True)
            (run / "results").mkdir()
            (run / "results" / "heldout-step-300-20260101-000000.json").touch()
        return 0.0

    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(demo, "command", made)
    monkeypatch.setattr(demo.TokenFile, "open", lambda *_: SimpleNamespace(num_tokens=1))
    for name in ("uniform_entropy", "unigram_entropy", "last_validation"):
        monkeypatch.setattr(demo, name, lambda *_: 1.0)
    monkeypatch.setattr(demo, "console", Console(width=80))
    demo.main()
    cells = [line.split("│")[2].strip() for line in capsys.readouterr().out.splitlines() if line.count("│") == 3]
    assert "results/heldout-step-300-20260101-000000.json" in "".join(cells)


def test_ctrl_c_waits_for_the_command_to_save(tmp_path: Path) -> None:
    slow = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: (time.sleep(1), pathlib.Path('saved').touch(), sys.exit(0)))\n"
        "pathlib.Path('ready').touch()\n"
        "time.sleep(60)\n"
    )
    root = f"pathlib.Path({str(tmp_path)!r})"
    code = f"import pathlib; from scripts import demo; demo.ROOT = {root}; demo.command('-c', {slow!r})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        subprocess.run(["kill", "-INT", "--", f"-{process.pid}"], check=True)  # as a terminal does: the whole group
        assert process.wait(timeout=60) == 130
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
    assert (tmp_path / "saved").exists()
