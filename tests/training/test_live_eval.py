"""Tasks on the model in training (`eval.every`): the right numbers, and a run that goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from efla_lm.evaluation import checkpoints
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.runner import load_tasks, run_tasks
from efla_lm.evaluation.scoring import Scorer
from efla_lm.evaluation.tokens import TokenPolicy
from efla_lm.run.metrics import read_rows
from tests.evaluation.material import write_task_files
from tests.training.launch import (
    ROOT,
    arguments,
    assert_same_weights,
    consumed,
    metrics,
    run_here,
    run_ranks,
    steady_rows,
    weights,
)

NAMES = ["sciq", "wikitext", "heldout"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("tasks"), documents=3)


def live(tasks: Path) -> list[str]:
    return ["eval.every=2", f"eval.tasks=[{','.join(NAMES)}]", f"eval.local_dir={tasks}", "eval.limit=2"]


def evaluations(runs: Path, name: str) -> list[dict[str, float]]:
    rows = read_rows(runs / name / "metrics.jsonl")
    return [row for row in rows if any(key.startswith("eval/") for key in row)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("model", "processes"), [("efla", 1), ("efla", 2), ("transformer", 1)])
def test_a_run_is_bit_for_bit_the_same_with_and_without(
    model: str, processes: int, corpus: Path, tasks: Path, tmp_path: Path
) -> None:
    common = [f"model={model}", "train.steps=5", "train.micro_tokens=16", "train.validate_every=2"]
    for name, more in (("plain", []), ("watched", live(tasks))):
        overrides = [*common, f"name={name}", *more]
        if processes == 1:
            assert run_here(corpus, tmp_path, *overrides) == 0
        else:
            run_ranks(processes, ROOT / "train.py", *arguments(corpus, tmp_path, *overrides), timeout=150)
    assert_same_weights(weights(tmp_path, "plain", 5), weights(tmp_path, "watched", 5))
    assert consumed(tmp_path, "plain") == consumed(tmp_path, "watched")
    found = evaluations(tmp_path, "watched")
    rest = [row for row in steady_rows(tmp_path, "watched") if row not in found]
    assert rest == steady_rows(tmp_path, "plain")
    assert [row["step"] for row in found] == [2, 4, 5]
    assert set(found[0]) == {
        "step", "eval/sciq/acc", "eval/sciq/acc_norm", "eval/wikitext/word_perplexity",
        "eval/wikitext/byte_perplexity", "eval/wikitext/bits_per_byte", "eval/heldout/word_perplexity",
        "eval/heldout/byte_perplexity", "eval/heldout/bits_per_byte",
    }  # fmt: skip
    perplexities = metrics(tmp_path, "watched", "eval/heldout/byte_perplexity")
    assert perplexities[0] != perplexities[-1], "the model that is evaluated is the one in training"

    # the last evaluation is that of the finished run's export
    network, tokenizer = checkpoints.load(checkpoints.find(str(tmp_path / "watched" / "export")))
    harness = HarnessLM(Scorer(network, 16), TokenPolicy(tokenizer))
    task_sets, _ = load_tasks(NAMES, tokenizer, tasks, corpus)
    expected = run_tasks(harness, task_sets, limit=2, bootstrap=0)["results"]
    for key, value in found[-1].items():
        if key != "step":
            _, task, metric = key.split("/")
            assert value == pytest.approx(expected[task][f"{metric},none"], rel=1e-4), key


def test_a_signal_in_an_evaluation_saves_and_leaves_it(
    corpus: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation before it is kept, the evaluation is made by the next launch, and nothing else differs."""
    common = ["train.steps=3", "train.micro_tokens=16", "train.validate_every=2", *live(tasks)]
    assert run_here(corpus, tmp_path, "name=straight", *common) == 0
    plain, calls = Scorer._forward, []

    def signalled(self, rows):  # type: ignore[no-untyped-def]
        calls.append(len(rows))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, rows)

    monkeypatch.setattr(Scorer, "_forward", signalled)
    assert run_here(corpus, tmp_path, "name=run", *common) == 0
    assert len(calls) == 2
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-2"]
    assert [row["step"] for row in steady_rows(tmp_path, "run")] == [1, 2, 2]
    assert run_here(corpus, tmp_path, "name=run", *common) == 0
    assert steady_rows(tmp_path, "run") == steady_rows(tmp_path, "straight")
    assert_same_weights(weights(tmp_path, "run", 3), weights(tmp_path, "straight", 3))


def test_a_task_that_cannot_be_had_is_named_before_training(
    corpus: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["train.steps=2", "name=x", "eval.every=1", "eval.tasks=[piqa]", f"eval.local_dir={tmp_path}"]
    assert run_here(corpus, tmp_path, *options) == 1
    assert f"error: eval.tasks: task piqa: no file {tmp_path}/piqa*_validation.jsonl[.gz]" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    options = ["train.steps=2", "eval.every=1", "eval.tasks=[piqa,sciq]", f"eval.local_dir={tmp_path}/none"]
    assert run_here(corpus, tmp_path, *options) == 1
    said = f"error: eval.tasks: tasks piqa, sciq: the folder {tmp_path}/none does not exist (eval.local_dir)\n"
    assert capsys.readouterr().err.endswith(said)


@pytest.mark.parametrize("half", ["eval.every=2", "eval.tasks=[sciq]"])
def test_an_interval_needs_tasks_and_tasks_an_interval(
    half: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(corpus, tmp_path, "train.steps=2", half) == 1
    assert "give both" in capsys.readouterr().err
