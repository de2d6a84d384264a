"""The frame of the studies: result files that continue, numbers and tables, figures of one kind of measurement."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from efla_lm.errors import UserError
from efla_lm.settings import PATH, key
from scripts.bench import report as ops_report
from scripts.mad import report as mad_report
from scripts.study import checks, plot, table
from scripts.study.launcher import Launcher
from scripts.study.result_file import ResultFile, command_line, portable, read
from scripts.throughput import report as throughput_report


def head(commit: str = "a", **settings: Any) -> dict[str, Any]:
    return {"environment": {"torch": "2", "commit": commit}, "command": "any", "settings": settings}


def test_a_stopped_study_continues_with_what_is_missing(tmp_path: Path) -> None:
    """Whole parts are left out; a part that was broken off is repeated, and its rows replace the earlier ones."""
    path = tmp_path / "result.json"

    def work(stop_in: str | None, settings: dict[str, Any]) -> list[str]:
        result, seen = ResultFile(path, settings, key=("op",)), []
        for part in result.missing(["a", "b", "c"]):
            seen.append(part)
            for number in (1, 2):
                result.add({"op": f"{part}{number}", "run": len(seen)})
                if part == stop_in:
                    return seen
        return seen

    assert work("b", head()) == ["a", "b"]
    assert [row["op"] for row in json.loads(path.read_text())["rows"]] == ["a1", "a2", "b1"]
    assert work(None, head() | {"command": "the same work by another command"}) == ["b", "c"]
    rows = json.loads(path.read_text())["rows"]
    assert [(row["op"], row["run"]) for row in rows] == [
        ("a1", 1),
        ("a2", 1),
        ("b1", 1),
        ("b2", 1),
        ("c1", 2),
        ("c2", 2),
    ]
    assert work(None, head()) == []


@pytest.mark.parametrize("other", [head("b"), head(steps=2)])
def test_rows_of_other_code_or_settings_are_moved_away(
    other: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    ResultFile(path, head(), key=("op",)).add({"op": "x"})
    before = path.read_text()
    assert ResultFile(path, other, key=("op",)).rows == []
    assert (tmp_path / "result.old.json").read_text() == before
    assert "result.old.json" in capsys.readouterr().err


@dataclass
class Settings:
    rates: list[float] = key([0.1])
    name: str = key("x y")
    out: str = key("results", path=PATH)


def test_the_command_in_a_file_names_what_differs_and_no_place() -> None:
    settings = Settings(rates=[0.5], out="/home/somebody/results")
    assert command_line("mad", settings) == "python -m scripts.mad rates=[0.5]"
    assert portable(settings) == {"rates": [0.5], "name": "x y"}
    assert portable(settings, without=("rates",)) == {"name": "x y"}


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"rows": [{"op": 1}], "experiment": "mad"}')
    assert read(tmp_path / "a.json", column="op") == read(tmp_path / "a.json", experiment="mad")
    for options in ({"column": "layer"}, {"experiment": "smnist"}):
        with pytest.raises(UserError, match=r"a\.json: expected a result file of"):
            read(tmp_path / "a.json", **options)
    with pytest.raises(UserError, match="no such result file"):
        read(tmp_path / "b.json", column="op")


def test_numbers_as_a_reader_expects_them() -> None:
    """No eleven digits of a perplexity without meaning, no spread of one value."""
    assert table.number(455935374049.6796, 4) == "4.56e+11"
    assert [table.number(x, 2) for x in (0.5, -12.345, 999_999.0)] == ["0.50", "-12.35", "999999.00"]
    assert table.number(0.5, sign=True) == "+0.50"
    assert table.mean_text([0.5]) == "0.50" and table.mean_text([]) == "missing"
    assert table.mean_text([0.5, 0.7]) == "0.60 ± 0.14"
    assert table.percent_text([0.925]) == "92.50 %" and table.percent_text([0.9, 0.9]) == "90.00 % ± 0.00"


def test_checks_name_key_value_and_what_fits() -> None:
    checks.expect_at_least(Settings(), 0, "rates")
    for check, said in (
        (lambda: checks.expect_at_least(Settings(), 1, "rates"), r"rates=\[0.1\]: expected a list of numbers, each at"),
        (
            lambda: checks.expect_above_zero(Settings(rates=[]), "rates"),
            r"rates=\[\]: expected a list of numbers above 0",
        ),
        (lambda: checks.expect_from(Settings(), rates=["a"]), r"rates=\[0.1\]: expected a list from a"),
    ):
        with pytest.raises(UserError, match=said):
            check()


def test_a_command_beyond_its_time_ends_with_all_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, file=open(PATH, 'w'), flush=True)"
    code = child.replace("PATH", repr(str(tmp_path / "pid"))) + "; time.sleep(60)"
    with Launcher() as launcher:
        done = launcher.run([sys.executable, "-c", code], 3)
    assert done.code is None
    status = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    for _ in range(50):
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("the command's own child still runs")


def drawn(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[Any]:
    """Figures instead of files."""
    figures: list[Any] = []
    monkeypatch.setattr(module, "save_figure", lambda figure, path, pdf=True: figures.append(figure))
    return figures


def op_row(op: str, impl: str, direction: str, us: float) -> dict[str, Any]:
    return {"op": op, "impl": impl, "direction": direction, "device_us": us, "heads": 8, "batch": 8, "tokens": 2048}


def test_a_panel_of_ops_shows_one_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose backward pass does not run here is not beside both passes of ours, where it would look fast."""
    figures = drawn(monkeypatch, ops_report)
    rows = [op_row("mamba2", "ours", way, us) for way, us in (("fwd", 3.0), ("fwd_bwd", 10.0))]
    ops_report.plot({"rows": [*rows, op_row("mamba2", "fla", "fwd", 5.0)]}, tmp_path / "ops.png")
    shown = {a.get_title(): [line.get_label() for line in a.get_lines()] for a in figures[0].axes}
    assert shown == {
        "H = 8, forward": ["Mamba-2, ours", "Mamba-2, fla"],
        "H = 8, forward + backward": ["Mamba-2, ours"],
    }


@pytest.mark.parametrize(("epochs", "marks"), [(40, 0), (200, 2)])
def test_the_papers_scores_are_drawn_only_beside_their_budget(
    epochs: int, marks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = drawn(monkeypatch, mad_report)
    about = {"task": "compression", "setting": "a", "rate": 1e-3, "weight_decay": 0.0, "seed": 0, "seconds": 1.0}
    runs = [{"mixer": mixer, "score": 0.5, "accuracy": 0.5} | about for mixer in ("efla", "deltanet")]
    budget = {"epochs": epochs, "batch": 128, "settings": "all", "precision": "fp32"}
    budget |= {"rates": [1e-3], "weight_decays": [0.0], "seeds": [0]}
    mad_report.write_report([{"budget": budget, "sweep": "x", "runs": runs}], tmp_path, figures=True)
    assert len(figures[0].axes[0].collections) == marks
    assert f"{epochs} epochs" in figures[0].axes[0].get_title()


def test_bars_of_throughput_are_of_one_visit_and_one_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = drawn(monkeypatch, throughput_report)
    row = {"model": "efla", "size": "340m", "impl": "efla_lm", "batch": 8, "tokens": 2048, "gpus": 1, "options": [],
           "parallel": "auto", "tokens_per_second": 1e5, "commit": "new"}  # fmt: skip
    rows = [
        row, row | {"model": "mamba2"}, row | {"model": "deltanet", "impl": "fla"},
        row | {"batch": 32, "commit": "old"},
        row | {"options": ["train.compile=false"]}, row | {"model": "transformer", "skipped": "no memory"},
    ]  # fmt: skip
    assert throughput_report.plot({"rows": rows, "environment": {"gpu": "X"}}, tmp_path / "bars.png") == 2
    (axis,) = figures[0].axes
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["EFLA", "DeltaNet (fla)", "Mamba-2"]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["8x2048"]
    assert "commit new" in axis.get_title()


def test_models_have_one_label_and_colour_everywhere() -> None:
    assert plot.label("transformer") == plot.label("attention") == "Transformer"
    assert plot.colour("transformer") == plot.colour("attention")
    assert plot.in_order(["mamba2", "efla", "mamba2"]) == ["efla", "mamba2"]
