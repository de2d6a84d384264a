"""Ours beside the stock model, as the command compares them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from scripts.eval_compare import __main__ as eval_compare
from scripts.eval_compare.run import Recorder, compare_values, largest_differences
from tests.evaluation.material import PAPER, save_export, write_task_files


@pytest.mark.timeout(180)
def test_the_command_compares_all_ten_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_task_files(tmp_path / "data", documents=3)
    export = save_export(tmp_path / "export")
    arguments = [f"checkpoint={export}", f"local_dir={data}", "device=cpu", f"out={tmp_path}/compare.json"]
    assert eval_compare.main.run([*arguments, "limit=2"]) == 0
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["values_agree"] and not report["counts_are_official"]
    assert report["documents"] == dict.fromkeys(PAPER, 2)
    assert {row["task"] for row in report["values"]} == set(PAPER)
    assert all(row["largest_difference_nats"] < 1e-3 for row in report["requests"].values())
    assert report["requests"]["hellaswag"]["requests"] == 8
    # without a limit the counts have to be the official ones, and these files are shorter
    assert eval_compare.main.run(arguments) == 1
    assert "counts are NOT the official ones" in capsys.readouterr().out


def test_perplexities_agree_within_the_bound_and_accuracies_exactly() -> None:
    stock = {
        "sciq": {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "sciq"},
        "wikitext": {"word_perplexity,none": 9},
    }
    close = {"sciq": {"acc,none": 0.5}, "wikitext": {"word_perplexity,none": 9.0008}}
    far = {"sciq": {"acc,none": 0.501}, "wikitext": {"word_perplexity,none": 9.001}}
    assert [row["agree"] for row in compare_values(close, stock)] == [True, True]
    assert [row["agree"] for row in compare_values(far, stock)] == [False, False]


class Fixed(LM):
    """Answers every request with one number."""

    def __init__(self, total: float) -> None:
        super().__init__()
        self.total = total

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        return [(self.total, True)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        return [self.total] * len(requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        return [""] * len(requests)


def request(kind: str, *texts: str) -> Instance:
    return Instance(kind, {}, texts, 0, metadata=("a task", 0, 1))


def test_differences_are_of_the_same_requests() -> None:
    one, two = Fixed(-3.0), Fixed(-3.5)
    recorders = [Recorder(one), Recorder(two)]
    for model in (one, two):
        assert model.loglikelihood([request("loglikelihood", "a", "b")]) == [(model.total, True)]
    one.loglikelihood_rolling([request("loglikelihood_rolling", "text")])
    with pytest.raises(ValueError, match="only one was asked"):
        largest_differences(*recorders)
    two.loglikelihood_rolling([request("loglikelihood_rolling", "text")])
    assert largest_differences(*recorders) == {"a task": {"requests": 2, "largest_difference_nats": 0.5}}


def test_steps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step = eval_compare.checkpoints.Checkpoint("step", str(tmp_path), tmp_path, 3)
    monkeypatch.setattr(eval_compare.checkpoints, "find", lambda given: step)
    assert eval_compare.main.run([f"checkpoint={tmp_path}", "device=cpu"]) == 1
    assert "give RUN/export" in capsys.readouterr().err
