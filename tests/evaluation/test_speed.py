"""The measurement of speed: it runs, and both sides do the same work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lm_eval import utils as harness_utils

from efla_lm.evaluation import checkpoints
from scripts.eval_speed import __main__ as eval_speed
from scripts.eval_speed import run as speed
from tests.evaluation.material import CONTEXT, PAPER, make_tokenizer, save_export, write_task_files
from tests.evaluation.test_stock_model import assert_same_numbers


def test_ours_and_the_stock_model_are_timed_on_the_same_documents(tmp_path: Path) -> None:
    data = write_task_files(tmp_path / "data")
    model, tokenizer = checkpoints.load(checkpoints.find(str(save_export(tmp_path / "export", "deltanet"))))
    task_sets = speed.tasks(PAPER, tokenizer, data)
    for task_set in task_sets[:3]:
        found = speed.timed(speed.ours(model, tokenizer, CONTEXT), task_set, 3, warm=True)
        theirs = speed.timed(speed.stock(model, tokenizer, CONTEXT, 4), task_set, 3, warm=False)
        assert found["seconds"] > 0 and found["first_seconds"] > 0 and theirs["seconds"] > 0
        same = {"n-samples": dict.fromkeys(task_set.tasks), "versions": dict.fromkeys(task_set.tasks)}
        assert_same_numbers(found | same, theirs | same, list(task_set.tasks))


def test_documents_and_templates_are_prepared_once(tmp_path: Path) -> None:
    """In our run alone, and lm-eval is as it was behind it."""
    data = write_task_files(tmp_path / "data")
    model, tokenizer = checkpoints.load(checkpoints.find(str(save_export(tmp_path / "export", "deltanet"))))
    (task_set,) = speed.tasks(["hellaswag"], tokenizer, data)
    task, compile_template = task_set.tasks["hellaswag"], harness_utils.env.from_string
    prepare, calls = task.config.process_docs, []
    task.config.process_docs = lambda docs: (calls.append("documents"), prepare(docs))[1]
    harness_utils.env.from_string = lambda text: (calls.append(text), compile_template(text))[1]
    try:
        for _ in range(2):
            speed.ours(model, tokenizer, CONTEXT)(task_set, 3)
            assert calls.count("documents") == 1 and len(calls) == len(set(calls))
            assert "validation_docs" not in vars(task)
            calls.clear()
        speed.stock(model, tokenizer, CONTEXT, 4)(task_set, 3)
        assert calls.count("documents") > 1 and len(calls) > 2 * len(set(calls))
    finally:
        harness_utils.env.from_string = compile_template


@pytest.mark.timeout(180)
def test_the_command_writes_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    data = write_task_files(tmp_path / "data", documents=2)
    make_tokenizer(bos=False).save_pretrained(tmp_path / "tokenizer")
    arguments = [
        f"tokenizer={tmp_path}/tokenizer", f"local_dir={data}", "size=tiny", "dtype=fp32", "device=cpu", "stock=false",
        "limit=2", "full_limit=1", "gpus=2", f"out={tmp_path}/speed.json",
    ]  # fmt: skip
    assert eval_speed.main.run(arguments) == 0
    report = json.loads((tmp_path / "speed.json").read_text())
    assert set(report["full"]["documents"].values()) == {1}
    assert report["full"]["seconds"] > sum(report["full"]["seconds_by_task"].values())
    assert (report["full"]["processes"], report["several"]["processes"]) == (1, 2)
    assert report["several"]["numbers"] >= len(PAPER) and report["several"]["unequal"] == []
    assert report["several"]["times_faster"] > 0 and report["several"]["times_faster_in_tasks"] > 0
    assert set(report["comparison"]["tasks"]) == set(PAPER) and report["comparison"]["seconds"]["ours_efla"] > 0


def test_the_comparison_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert eval_speed.main.run([f"tokenizer={tmp_path}", "device=cpu"]) == 1
    assert "set stock=false" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["gpus=2", "full=false"], ["full_limit=3", "full=false"], ["limit=0"]])
def test_options_that_mean_nothing_together_are_refused(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eval_speed.main.run([f"tokenizer={tmp_path}", "device=cpu", "stock=false", *given]) == 1
    assert f"error: {given[-1]}: " in capsys.readouterr().err


def test_more_gpus_than_there_are_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(eval_speed, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert eval_speed.main.run([f"tokenizer={tmp_path}", "gpus=2"]) == 1
    assert "error: gpus=2: this machine has 1" in capsys.readouterr().err
