"""The study of the factorial: its runs are train.py's, it continues after a stop, and its statistics are right."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from scipy import stats

from scripts.lm_study import analysis, worker
from scripts.lm_study.__main__ import main
from scripts.lm_study.analysis import Study, effects, estimate, paired
from scripts.lm_study.report import write_report
from scripts.lm_study.run import record_of
from scripts.lm_study.settings import LmStudySettings, Trial, repeats, sweep, train_arguments
from tests.training.corpus import write_corpus

ROOT = Path(__file__).resolve().parents[2]
TINY = ["model.num_hidden_layers=1", "model.hidden_size=32", "model.head_dim=16", "model.intermediate_size=32"]
ARMS = ["deltanet", "efla_gate", "efla_value", "efla"]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tokens", tokens=4096, heldout=600)


def tiny(tokens: Path, folder: Path) -> LmStudySettings:
    """A study of four arms at one rate with two seeds: eight runs of 48 updates."""
    return LmStudySettings(
        arms=ARMS, rates=[4e-3], seeds=[1, 2], size="tiny", data_dir=str(tokens), context=32, tokens=48 * 64,
        batch_tokens=64, train=TINY, runs_dir=str(folder / "runs"), out=str(folder / "out"), figures=False,
    )  # fmt: skip


def elsewhere(trial: Trial, settings: LmStudySettings) -> list[str]:
    """The same command in another folder."""
    direct = Path(settings.out).parent / "direct"
    return [f"runs_dir={direct}" if x.startswith("runs_dir=") else x for x in train_arguments(trial, settings)]


def results(settings: LmStudySettings) -> dict[tuple[str, int], dict]:
    content = json.loads((Path(settings.out) / "lm_study.json").read_text())
    return {(run["arm"], run["seed"]): run for run in content["runs"]}


def test_runs_are_those_of_train_py_and_a_stop_changes_nothing(tokens: Path, tmp_path: Path) -> None:
    settings = tiny(tokens, tmp_path)
    stopped = Trial("deltanet", 4e-3, 1)
    settings.runs.mkdir(parents=True)
    log = settings.runs / f"{stopped.name}.log"
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, worker.initialise, (context.Event(),)) as pool:
        code, seconds = pool.submit(worker.train, train_arguments(stopped, settings), log, time.time() - 1).result()
        assert pool.submit(worker.train, elsewhere(stopped, settings), log, None).result()[0] == 0
    record = record_of(stopped, settings, code, seconds)
    assert (code, record["state"], record["heldout"]) == (0, "stopped", None)
    assert not any(tokens >= settings.tokens for tokens, _ in record["training"])
    assert list((settings.runs / stopped.name / "checkpoints").glob("step-*")), log.read_text()

    assert main.work(settings) == 0
    runs = results(settings)
    assert {run["state"] for run in runs.values()} == {"done"} and len(runs) == 8
    assert len({run["parameters"] for run in runs.values()}) == 1
    assert runs["deltanet", 1]["seconds"] > seconds  # of both launches
    assert not list(settings.runs.glob("*/checkpoints"))

    command = [sys.executable, str(ROOT / "train.py"), *elsewhere(Trial("efla", 4e-3, 1), settings)]
    subprocess.run(command, check=True, capture_output=True)
    for arm in ("deltanet", "efla"):
        metrics = tmp_path / "direct" / Trial(arm, 4e-3, 1).name / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        run = runs[arm, 1]
        assert run["validations"] == [[row["step"] * 64, row["val_loss"]] for row in rows if "val_loss" in row]
        # a stop adds a row of its own to the record of training
        kept = dict(map(tuple, run["training"]))
        assert {row["tokens"]: row["loss"] for row in rows if "loss" in row}.items() <= kept.items()


def test_corners_start_alike_and_differ(tokens: Path, tmp_path: Path) -> None:
    settings = replace(tiny(tokens, tmp_path), seeds=[3], tokens=2 * 64)
    assert main.work(settings) == 0
    runs = results(settings)
    assert len({run["heldout"] for run in runs.values()}) == 4
    losses = [run["training"][0][1] for run in runs.values()]
    assert max(losses) - min(losses) < 0.05 * losses[0]  # same weights, same first batch

    again = (Path(settings.out) / "lm_study.json").read_bytes()
    assert main.work(settings) == 0  # all trials are there: nothing is trained
    assert (Path(settings.out) / "lm_study.json").read_bytes() == again


def test_another_study_in_the_same_file_is_refused(tokens: Path, tmp_path: Path, capsys) -> None:
    settings = tiny(tokens, tmp_path)
    content = {"experiment": "lm_study", "plan": {name: getattr(settings, name) for name in vars(settings)}, "runs": []}
    content["plan"]["batch_tokens"] = 128
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "lm_study.json").write_text(json.dumps(content))
    arguments = [f"data_dir={tokens}", f"out={tmp_path / 'out'}", "size=tiny", "context=32", "tokens=3072"]
    assert main.run([*arguments, "batch_tokens=64", f"train={TINY}".replace("'", "")]) == 1
    assert "batch_tokens: got 64" in capsys.readouterr().err


def run(arm: str, rate: float, seed: int, loss: float | None, state: str = "done") -> dict:
    return {"arm": arm, "rate": rate, "seed": seed, "state": state, "heldout": loss}


def content(runs: list[dict], rates: list[float], arms: list[str], seeds: list[int], sweep_seeds: int = 1) -> dict:
    return {"plan": {"arms": arms, "rates": rates, "seeds": seeds, "sweep_seeds": sweep_seeds}, "runs": runs}


def test_best_rates_take_as_many_trials_for_each_arm() -> None:
    runs = [
        run("a", 1e-3, 1, 3.0), run("a", 2e-3, 1, 2.0), run("a", 4e-3, 1, None, "diverged"), run("a", 8e-3, 1, 1.0),
        run("b", 1e-3, 1, 3.0), run("b", 2e-3, 1, 2.5), run("b", 4e-3, 1, 2.4),
        run("b", 8e-3, 1, None, "stopped"), run("a", 1e-3, 2, 0.5),
    ]  # fmt: skip
    study = Study.of(content(runs, [1e-3, 2e-3, 4e-3, 8e-3], ["a", "b"], [1, 2]))
    assert study.compared_rates() == [1e-3, 2e-3, 4e-3]  # b has no end at 8e-3
    assert (study.best_rate("a"), study.best_rate("b")) == (2e-3, 4e-3)  # seed 2 met one rate and does not choose
    assert study.kept_rates() == [2e-3, 4e-3]
    assert [w for w in study.warnings() if "0.008" in w] and not [w for w in study.warnings() if "of the grid" in w]

    edge = Study.of(content(runs[:2] + runs[4:6], [1e-3, 2e-3], ["a", "b"], [1]))
    assert sum("highest of the grid" in w for w in edge.warnings()) == 2
    assert Study.of(content([run("a", 1e-3, 1, None, "diverged")], [1e-3], ["a"], [1])).best_rate("a") is None


@pytest.mark.parametrize("count", range(2, 17))
def test_intervals_are_student_s(count: int) -> None:
    values = [math.sin(3 * n) for n in range(count)]
    found = estimate(values)
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx(tuple(interval), abs=2e-4)
    assert len(analysis.T_QUANTILES) == 15


def test_one_seed_has_no_interval_and_diverged_runs_no_difference() -> None:
    assert estimate([0.5]).half is None and "one seed" in str(estimate([0.5]))
    assert paired({1: 3.0, 2: math.inf, 3: 2.0}, {1: 2.5, 2: 2.0, 4: 1.0}) == [0.5]


def test_effects_take_the_factorial_apart() -> None:
    def losses(arm: str) -> dict[int, float]:
        gate, values = analysis.CORNERS[arm]
        return {seed: 5 + 0.1 * seed - 0.3 * gate - 0.05 * values + 0.02 * gate * values for seed in (1, 2, 3)}

    found = effects({arm: losses(arm) for arm in ARMS})
    assert found["gate"].mean == pytest.approx(-0.3 + 0.01)
    assert found["values"].mean == pytest.approx(-0.05 + 0.01)
    assert found["interaction"].mean == pytest.approx(0.02)
    assert found["gate"].half == pytest.approx(0, abs=1e-12)  # what seeds share is taken out by the pairs
    assert effects({arm: losses(arm) if arm != "efla" else {1: math.inf} for arm in ARMS}) == {}


def test_trials_of_sweep_and_repeats(tmp_path: Path) -> None:
    settings = replace(tiny(tmp_path, tmp_path), rates=[1e-3, 2e-3, 4e-3], seeds=[1, 2, 3])
    assert len(sweep(settings)) == 4 * 3
    assert [t.arm for t in sweep(settings)[:4]] == ARMS  # a stop leaves whole rates
    assert {(t.seed, t.rate) for t in repeats(settings, [2e-3])} == {(2, 2e-3), (3, 2e-3)}
    arguments = train_arguments(sweep(settings)[0], settings)
    assert "train.steps=48" in arguments and "train.validate_every=12" in arguments
    assert "schedule.initial=0.0001" in arguments and "schedule.warmup_updates=5" in arguments


@pytest.mark.parametrize("states", ["none", "stopped", "diverged", "one arm", "all"])
def test_the_report_says_what_is_there(states: str, tmp_path: Path) -> None:
    place = {"environment": {"device": "CPU", "commit": "0123456789"}, "parallel_runs": 1, "seconds": 60.0}
    more = {"validations": [[64, 5.0], [128, 4.0]], "tokens_per_second": 10.0, "parameters": 1234}
    arms = ARMS[:1] if states == "one arm" else ARMS
    state = states if states in ("stopped", "diverged") else "done"
    runs = [
        run(arm, rate, seed, 4.0 + n / 10 + seed * rate if state == "done" else None, state) | place | more
        for n, arm in enumerate(arms)
        for rate in (1e-3, 2e-3)
        for seed in (1, 2)
    ]
    made = content([] if states == "none" else runs, [1e-3, 2e-3], ARMS, [1, 2])
    made["plan"] |= {"name": "t", "size": "tiny", "tokens": 128, "batch_tokens": 64, "context": 32}
    text = write_report(made, tmp_path, figures=True)
    assert text == (tmp_path / "lm_study.md").read_text()
    assert ("not every arm has been trained" in text) == (states in ("none", "stopped", "one arm"))
    assert ("no rate gave a finite loss" in text) == (states == "diverged")
    assert ("+0.3000 ± " in text and "saturating gate" in text) == (states == "all")
    assert f"{len(made['runs'])} runs" in text
