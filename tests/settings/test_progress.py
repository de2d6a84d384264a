"""Plain lines where nobody watches, a live line on a terminal."""

import io
import re

import pytest

from efla_lm.run import progress as module
from efla_lm.run.progress import Progress, banner


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def updates(stream: io.StringIO, main: bool = True) -> str:
    with Progress(4, main=main, stream=stream) as progress:
        for step in range(1, 5):
            progress.update(step, loss=2.0 / step, lr=3e-4, tokens_per_second=12345.6, log=step % 2 == 0)
            if step == 2:
                progress.validated(step, 1.5)
        progress.message("saved [brackets]")
    return stream.getvalue()


def test_plain_lines():
    lines = updates(io.StringIO()).splitlines()
    assert len(lines) == 4
    assert re.fullmatch(r"step 2/4  loss 1\.0000  lr 3\.00e-04  12,346 tokens/s  ETA \d+:\d\d:\d\d", lines[0])
    assert lines[1] == "step 2/4  validation loss 1.5000  perplexity 4.48"
    assert lines[2].startswith("step 4/4  loss 0.5000  val 1.5000") and lines[2].endswith("ETA 0:00:00")
    assert lines[3] == "saved [brackets]"


def test_live_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = updates(Terminal())
    assert "step 4/4" in text and "saved [brackets]" in text
    assert "\x1b[" in text


def test_other_ranks_are_silent():
    assert updates(io.StringIO(), main=False) == ""
    assert updates(Terminal(), main=False) == ""
    stream = io.StringIO()
    banner("x", {"a": 1}, main=False, stream=stream)
    assert stream.getvalue() == ""


def test_eta_follows_the_present_speed(monkeypatch):
    clock = iter([0.0, 1000.0, *(1000.0 + i for i in range(1, 61))])  # a slow first update, then one a second
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    progress = Progress(3661 + 61, stream=io.StringIO())
    for step in range(1, 62):
        progress.update(step, loss=1.0, lr=1.0, tokens_per_second=1.0, log=False)
    assert progress.eta() == "1:01:01"


def test_eta_does_not_count_the_start_up(monkeypatch):
    """A launch that resumes at step 100: two slow steps, then one a second; 896 of 1000 are left after the fourth."""
    clock = iter([0.0, 500.0, 501.0, 502.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    progress = Progress(1000, start_step=100, stream=io.StringIO())
    etas = []
    for step in range(101, 105):
        progress.update(step, loss=1.0, lr=1.0, tokens_per_second=None)
        etas.append(progress.eta())
    assert etas[0] == "?" and etas[2:] == ["0:14:57", "0:14:56"]


def test_speed_that_is_not_known_yet():
    stream = io.StringIO()
    Progress(9, stream=stream).update(1, loss=1.0, lr=1.0, tokens_per_second=None)
    assert stream.getvalue() == "step 1/9  loss 1.0000  lr 1.00e+00  ? tokens/s  ETA ?\n"


def test_no_validation_loss():
    stream = io.StringIO()
    progress = Progress(9, stream=stream)
    progress.measured(1, {"val_loss": None})
    progress.measured(2, {"eval/sciq/acc": 0.5})
    assert stream.getvalue() == (
        "step 1/9  no validation loss: the held-out data have no targets\nstep 2/9  evaluation: sciq/acc 0.5\n"
    )


def test_unbounded_validation_loss():
    stream = io.StringIO()
    Progress(1, stream=stream).validated(1, 800.0)
    assert "perplexity inf" in stream.getvalue()


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_banner_names_every_fact(stream):
    banner("efla-lm", {"model": "efla tiny", "parameters": 1_376_000, "path": "[x]/y"}, stream=stream)
    for word in ("efla-lm", "efla tiny", "1376000", "[x]/y"):
        assert word in stream.getvalue()
