"""Table 1 from result files: missing and extra tasks, several seeds, and means that are computed."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from efla_lm.evaluation.results import PAPER_COLUMNS, print_table
from scripts.table1 import table as table1
from scripts.table1.__main__ import main as command

# accuracies of the tests: 0.31, 0.32, ... in the order of the columns
ACCURACY = {heading: 0.30 + 0.01 * n for n, (heading, *_) in enumerate(PAPER_COLUMNS) if n > 1}


def result(
    family: str = "efla",
    size: str | None = "340m",
    seed: int = 42,
    shift: float = 0.0,
    without: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    limit: int | None = None,
    started: str = "2026-01-01T00:00:00+0000",
    weights: str | None = None,
) -> dict[str, Any]:
    """What eval.py writes, as far as the table reads it."""
    results: dict[str, Any] = {}
    for heading, task, metric, is_accuracy in PAPER_COLUMNS:
        if task not in without:
            name, _, kind = metric.partition(",")
            value = ACCURACY[heading] + shift if is_accuracy else 40.0 + 100 * shift
            error = "N/A" if task == "wikitext" else 0.01
            results.setdefault(task, {"alias": task}).update({metric: value, f"{name}_stderr,{kind}": error})
    about = {
        "model": {"family": family, "size": size, "seed": seed},
        "weights_sha256": weights or f"{family}-{size}-{seed}",
        "started": started,
        "step": 8192,
        "settings": {"limit": limit},
    }
    return {"results": results | (extra or {}), "evaluation": about}


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def table(out: Path, *runs: Path) -> dict[tuple[str, str, str], dict[str, str]]:
    """The CSV of the command by (size, family, column)."""
    assert command.run([f"runs=[{','.join(map(str, runs))}]", f"out={out}"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["table1.csv", "table1.md", "table1.tex"]
    with (out / "table1.csv").open() as stream:
        return {(row["size"], row["family"], row["column"]): row for row in csv.DictReader(stream)}


def test_the_papers_averages_are_computed_from_its_nine_accuracies() -> None:
    source, paper = table1.read_paper()
    assert "2512.12602v4" in source
    computed = {key: round(row.average, 1) for key, row in paper.items()}
    assert computed == {
        ("340m", "mamba2"): 42.0, ("340m", "deltanet"): 43.1, ("340m", "efla"): 44.1, ("340m", "gated_deltanet"): 43.9,
        ("340m", "gated_efla"): 44.8, ("1b3", "deltanet"): 50.5, ("1b3", "efla"): 51.7,
    }  # fmt: skip
    printed = {key: row.printed_average for key, row in paper.items()}
    assert {key for key in paper if computed[key] != printed[key]} == {("340m", "deltanet"), ("1b3", "efla")}
    assert paper["340m", "efla"].values["LMB ppl"] == 79.97


def test_values_errors_the_papers_values_and_differences(tmp_path: Path) -> None:
    run = write(tmp_path / "run" / "results" / "paper.json", result()).parent.parent
    cells = table(tmp_path / "out", run)
    assert len(cells) == 12
    piqa = cells["340m", "efla", "PIQA acc"]
    assert float(piqa["value"]) == pytest.approx(33.0)
    assert float(piqa["standard_error"]) == pytest.approx(1.0)
    assert float(piqa["paper"]) == 61.0
    assert float(piqa["difference"]) == pytest.approx(33.0 - 61.0)
    wiki = cells["340m", "efla", "Wiki ppl"]
    assert (float(wiki["value"]), wiki["standard_error"], wiki["spread"]) == (40.0, "", "")
    average = cells["340m", "efla", "avg"]
    assert float(average["value"]) == pytest.approx(100 * statistics.fmean(ACCURACY.values()))
    assert float(average["standard_error"]) == pytest.approx(1.0 / 9**0.5)
    assert float(average["paper"]) == pytest.approx(44.0667, abs=1e-4)


def test_huge_perplexities_have_three_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An untrained model's perplexity is 4.56e+11, in the table of a run and in Table 1; files keep the number."""
    content = result()
    content["results"]["wikitext"]["word_perplexity,none"] = 455935374049.6796
    cells = table(tmp_path / "out", write(tmp_path / "a.json", content))
    assert float(cells["340m", "efla", "Wiki ppl"]["value"]) == 455935374049.6796
    for ending in ("md", "tex"):
        text = (tmp_path / "out" / f"table1.{ending}").read_text()
        assert "4.56e+11" in text and "455935374049" not in text
    capsys.readouterr()
    counts = {task: {"effective": 3} for task in content["results"]}
    print_table(content | {"missing": {}, "n-samples": counts}, "a run")
    shown = capsys.readouterr().out
    assert "4.56e+11" in shown and "455935374049" not in shown


def test_a_missing_task_is_shown_as_missing_and_an_extra_one_is_ignored(tmp_path: Path) -> None:
    content = result(without=("boolq",), extra={"mmlu": {"acc,none": 0.25}, "piqa_extra": {"acc,none": 1.0}})
    cells = table(tmp_path / "out", write(tmp_path / "a.json", content))
    assert cells["340m", "efla", "BoolQ acc"]["value"] == ""
    assert cells["340m", "efla", "BoolQ acc"]["paper"] == "59.7"
    assert cells["340m", "efla", "avg"]["value"] == ""
    assert cells["340m", "efla", "avg"]["difference"] == ""
    assert {column for _, _, column in cells} == set(table1.HEADINGS)
    text = (tmp_path / "out" / "table1.md").read_text()
    ours = next(line for line in text.splitlines() if "340M EFLA" in line)
    assert [cell.strip() for cell in ours.split("|")].count("missing") == 2
    assert "mmlu" not in text


def test_two_seeds_give_their_mean_and_spread(tmp_path: Path) -> None:
    one = write(tmp_path / "one" / "results" / "r.json", result(seed=42)).parent.parent
    two = write(tmp_path / "two" / "results" / "r.json", result(seed=43, shift=0.02, without=("sciq",))).parent.parent
    cells = table(tmp_path / "out", one, two)
    piqa = cells["340m", "efla", "PIQA acc"]
    assert float(piqa["value"]) == pytest.approx(34.0)
    assert float(piqa["spread"]) == pytest.approx(statistics.stdev([33.0, 35.0]))
    assert float(piqa["standard_error"]) == pytest.approx(1.0), "more seeds do not shrink the error of the documents"
    assert piqa["runs"] == "2"
    assert cells["340m", "efla", "SciQ acc"]["runs"] == "1"
    text = (tmp_path / "out" / "table1.md").read_text()
    assert "ours, mean of 2" in text
    assert "340M EFLA: not all of its 2 runs have SciQ acc, avg." in text
    assert "seed 43" in text


def test_models_stand_in_the_papers_order_and_unknown_ones_after_them(tmp_path: Path) -> None:
    files = [
        write(tmp_path / f"{n}.json", result(family, size, weights=str(n)))
        for n, (family, size) in enumerate(
            [("llama", None), ("efla", "1b3"), ("attention", "340m"), ("gated_efla", "340m"), ("deltanet", "340m")]
        )
    ]
    cells = table(tmp_path / "out", *files)
    order = list(dict.fromkeys((size, family) for size, family, _ in cells))
    assert order == [
        ("340m", "deltanet"), ("340m", "gated_efla"), ("1b3", "efla"), ("", "llama"), ("340m", "attention"),
    ]  # fmt: skip
    assert cells["", "llama", "PIQA acc"]["paper"] == ""
    text = (tmp_path / "out" / "table1.md").read_text()
    assert "43.1 (printed 42.2)" in text
    assert "51.7 (printed 51.8)" in text
    assert "(printed 44.8)" not in text


def test_files_of_the_newest_weights_complete_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "results"
    stamps = [f"2026-01-0{day}T00:00:00+0000" for day in range(1, 6)]
    write(folder / "old.json", result(shift=0.2, weights="old", started=stamps[0]))
    write(folder / "b.json", result(shift=0.01, without=("piqa",), weights="new", started=stamps[1]))
    write(folder / "c.json", result(without=("sciq", "boolq"), weights="new", started=stamps[2]))
    write(folder / "d.json", result(shift=0.3, limit=10, weights="new", started=stamps[3]))
    cells = table(tmp_path / "out", tmp_path / "run")
    assert float(cells["340m", "efla", "PIQA acc"]["value"]) == pytest.approx(33.0), "newer file, all documents"
    assert float(cells["340m", "efla", "BoolQ acc"]["value"]) == pytest.approx(39.0), "from the file that has it"
    assert cells["340m", "efla", "avg"]["limit"] == ""


def test_a_few_documents_are_marked(tmp_path: Path) -> None:
    table(tmp_path / "out", write(tmp_path / "a.json", result(limit=10)))
    text = (tmp_path / "out" / "table1.md").read_text()
    assert "33.0*" in text
    assert "first 10 documents" in text


def test_a_run_without_results_is_a_row_of_missing_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 7\nsize: {name: 1b3}\nmodel: {mixer: deltanet}\n")
    cells = table(tmp_path / "out", tmp_path / "run")
    assert {row["value"] for row in cells.values()} == {""}
    assert cells["1b3", "deltanet", "avg"]["paper"] != ""
    run = tmp_path / "run"
    assert f"warning: no result in {run}: python eval.py checkpoint={run} tasks=paper" in capsys.readouterr().err


def test_results_of_the_stock_harness_are_read_too(tmp_path: Path) -> None:
    content = {"results": result()["results"]}
    cells = table(tmp_path / "out", write(tmp_path / "theirs.json", content))
    assert float(cells["", "theirs", "PIQA acc"]["value"]) == pytest.approx(33.0)


@pytest.mark.parametrize(
    ("content", "complaint"), [("[]", "it has no `results`"), ("{", "is not a result file"), (None, "no such run")]
)
def test_what_is_no_result_is_one_clear_line(
    content: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    assert command.run([f"runs=[{path}]", f"out={tmp_path}/out"]) == 1
    assert complaint in capsys.readouterr().err


def test_the_same_weights_are_not_two_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(tmp_path / f"{name}.json", result()) for name in "ab")
    assert command.run([f"runs=[{a},{b}]", f"out={tmp_path}/out"]) == 1
    assert "hold the same weights" in capsys.readouterr().err


def test_latex_has_as_many_cells_in_every_line(tmp_path: Path) -> None:
    table(tmp_path / "out", write(tmp_path / "a.json", result(without=("boolq",))))
    lines = [line for line in (tmp_path / "out" / "table1.tex").read_text().splitlines() if line.endswith("\\\\")]
    assert len(lines) == 1 + 4
    assert {line.count("&") for line in lines} == {13}
    assert "acc$_n$" in lines[0]
