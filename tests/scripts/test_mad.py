"""MAD models learn, count and report as the protocol does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from efla_data.tasks.mad import BASELINES, IGNORED, generate

from scripts.mad import training as mad
from scripts.mad.__main__ import main
from scripts.mad.report import PAPER, gather, task_scores
from scripts.stacked.modules import initialise
from scripts.study.result_file import merge

CPU = torch.device("cpu")
SMALL = mad.Budget(epochs=2, batch=32, test_examples=64)


def test_score_is_accuracy_per_class_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = BASELINES["memorization"]
    model = mad.MadModel("efla", 1, setting)
    _, targets = generate(setting, "test", 40)
    favourite = int(targets[targets != IGNORED][0])

    def always(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(1, *ids.shape, setting.vocab_size)
        logits[..., favourite] = 1.0
        return logits

    monkeypatch.setattr(model, "forward", always)
    macro, micro = mad.score(model, setting, replace(SMALL, test_examples=40), CPU)
    asked = targets[targets != IGNORED]
    assert micro[0] == pytest.approx((asked == favourite).mean())
    assert macro[0] == pytest.approx(1 / len(set(asked.tolist())))


def test_members_learn_apart_and_the_loss_falls() -> None:
    setting = replace(BASELINES["memorization"], vocab_size=16, length=8, train_examples=64)
    members = [mad.Member(3e-3, 0.0, 0), mad.Member(1e-6, 0.0, 0)]
    results = mad.train_and_score("efla", setting, members, replace(SMALL, epochs=40), CPU)
    fast, slow = results
    assert fast["train"]["loss"][-1] < 0.5 < slow["train"]["loss"][-1]
    assert fast["score"] > 0.9 > slow["score"]
    assert fast["train"]["step"][-1] == 80


def test_compression_answers_from_the_last_token_alone() -> None:
    setting = BASELINES["compression"]
    model = mad.MadModel("deltanet", 1, setting)
    initialise(model, [0])
    ids = torch.from_numpy(generate(setting, "test", 4)[0])
    with torch.no_grad():
        seen: list[torch.Tensor] = []
        model.decoder_norms[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        logits = model(ids)
    assert logits.shape == (1, 4, 32, 16)
    code = seen[0] - model.positions
    torch.testing.assert_close(code, code[:, :, :1].expand_as(code), atol=1e-5, rtol=0)


def test_weight_decay_leaves_biases_norms_and_constants() -> None:
    names = dict(mad.MadModel("gated_efla", 1, BASELINES["compression"]).named_parameters())
    spared = {name.rsplit(".", 1)[0].rsplit(".", 1)[-1] + "." + name.rsplit(".", 1)[-1] for name in names
              if not mad.decays(name)}  # fmt: skip
    assert spared == {
        "mixer_norm.weight", "mlp_norm.weight", "o_norm.weight", "norm.weight", "gates.A_log", "gates.dt_bias",
        "0.weight", "1.weight", "0.bias", "1.bias", "head.bias",
    }  # fmt: skip
    assert all(mad.decays(n) for n in names if n.startswith("decoder.") and n.endswith("weight"))


def test_best_member_per_setting_then_mean_over_settings() -> None:
    base = {"mixer": "efla", "task": "memorization", "weight_decay": 0.0, "seed": 0}
    runs = [
        base | {"setting": "a", "rate": 1e-3, "score": 0.2, "accuracy": 0.9},
        base | {"setting": "a", "rate": 1e-4, "score": 0.4, "accuracy": 0.1},
        base | {"setting": "b", "rate": 1e-3, "score": 1.0, "accuracy": 1.0},
    ]
    assert task_scores(runs)["efla"]["memorization"] == (pytest.approx(0.7), 2)
    newer = [{"budget": 1, "runs": runs}, {"budget": 1, "runs": [runs[0] | {"score": 0.9}]}]
    assert task_scores(gather(newer))["efla"]["memorization"][0] == pytest.approx(0.95)


def test_files_of_several_visits_become_one() -> None:
    one = {"budget": 1, "environment": {"commit": "a"}, "runs": [1]}
    assert merge([one], [1]) == one
    both = merge([one, one | {"environment": {"commit": "b"}}], [1, 2])
    assert both == {"budget": 1, "environment": [{"commit": "a"}, {"commit": "b"}], "runs": [1, 2]}


def test_paper_averages_are_the_printed_ones() -> None:
    assert [round(sum(row) / 6, 1) for row in PAPER.values()] == [65.7, 66.5]  # 66.4 is printed for EFLA


def test_command_and_replot(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["sweep=reduced", "tasks=[compression,memorization]", "mixers=[deltanet]", "examples=64", "epochs=1",
             "test_examples=64", "device=cpu", "figures=false", f"out={tmp_path / 'a'}"]  # fmt: skip
    assert main.run(small) == 0
    content = json.loads((tmp_path / "a" / "mad.json").read_text())
    assert [r["task"] for r in content["runs"]] == ["compression", "memorization"]
    assert "| DeltaNet |" in capsys.readouterr().out
    again = [f"replot=[{tmp_path / 'a' / 'mad.json'}]", f"out={tmp_path / 'b'}"]
    assert main.run(again) == 0
    assert (tmp_path / "a" / "mad.md").read_text() == (tmp_path / "b" / "mad.md").read_text()
    made = {"mad.json", "mad.csv", "mad.md", "mad-figure3.png", "mad-figure3.pdf"}
    assert {p.name for p in (tmp_path / "b").iterdir()} == made
    assert json.loads((tmp_path / "b" / "mad.json").read_text()) == content
    assert main.run(["tasks=[recall]"]) == 1
    assert "expected a list from compression" in capsys.readouterr().err
