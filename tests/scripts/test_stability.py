"""The discretisation error against a recurrence written out, and the command on a model folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from efla_data.corpus.recipe import Recipe

from efla_lm import EflaConfig, EflaForCausalLM, initialise
from efla_lm.errors import UserError
from scripts.stability.__main__ import main
from scripts.stability.discretisation import EDGES, Recorded, euler_error, record, survival

MIXERS = ("efla", "deltanet", "gated_efla", "gated_deltanet")


def tiny(mixer: str, vocab_size: int = 50) -> EflaForCausalLM:
    config = EflaConfig(
        mixer=mixer, vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, num_heads=2, intermediate_size=48,
        initializer_range=0.3, max_position_embeddings=16,
    )  # fmt: skip
    model = EflaForCausalLM(config)
    initialise(model, 0)
    return model.eval()


def given(scale: float, gated: bool = False) -> Recorded:
    generator = torch.Generator().manual_seed(0)
    k, v = scale * torch.randn(2, 2, 20, 2, 8, generator=generator)
    beta = torch.rand(2, 20, 2, generator=generator)
    return Recorded(k, v, beta, -torch.rand(2, 20, 2, generator=generator) if gated else None)


def written_out(layer: Recorded, b: int, h: int, exact: bool) -> torch.Tensor:
    S = torch.zeros(8, 8, dtype=torch.float64)
    for t in range(layer.k.shape[1]):
        k, v = layer.k[b, t, h].double(), layer.v[b, t, h].double()
        beta, lam, g = layer.beta[b, t, h].item(), float(k @ k), 1.0
        if layer.log_g is not None:
            g = math.exp(layer.log_g[b, t, h].item())
        if exact:
            eta = (1 - g) + g * beta * lam
            erase, write, decay = (
                (1 - math.exp(-g * beta * lam)) / lam,
                beta * (1 - math.exp(-eta)) / eta,
                math.exp(g - 1),
            )
        else:
            erase, write, decay = beta, beta, g
        S = decay * (S - erase * torch.outer(k, k @ S)) + write * torch.outer(k, v)
    return S


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("scale", [0.1, 0.5])
def test_error_is_that_of_the_recurrences(gated: bool, scale: float) -> None:
    layer = given(scale, gated)
    measured = euler_error(layer)["heads"]
    for head in range(2):
        errors = []
        for row in range(2):
            exact, euler = (written_out(layer, row, head, flag) for flag in (True, False))
            errors.append(float((euler - exact).norm() / exact.norm()))
        assert measured[head]["euler_error_worst"] == pytest.approx(max(errors), rel=1e-4)


def test_error_falls_with_the_step_and_explodes_beyond_two() -> None:
    small, middle = (euler_error(given(scale))["heads"][0] for scale in (0.05, 0.3))
    assert 0 < small["euler_error_median"] < 0.1 * middle["euler_error_median"]
    assert small["share_beyond_1"] == 0
    huge = euler_error(given(3.0))["heads"][0]
    assert huge["share_beyond_2"] > 0.9 and huge["euler_error_median"] > 1e6
    assert huge["unit_error_median"] < 100  # unit keys keep beta lam below 1
    assert sum(huge["histogram"]) == 2 * 20 and len(huge["histogram"]) == len(EDGES) - 1


@pytest.mark.parametrize("mixer", MIXERS)
def test_recorded_inputs_are_the_rules_own(mixer: str) -> None:
    model = tiny(mixer)
    ids = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(1))
    layers = record(model, ids)
    assert len(layers) == 2 and layers[0].k.shape == (3, 24, 2, 16)
    unit = layers[0].k.norm(dim=-1)
    assert torch.allclose(unit, torch.ones_like(unit), atol=1e-3) == ("deltanet" in mixer)
    assert (layers[0].log_g is not None) == mixer.startswith("gated")
    assert all(block.mixer.rule.__name__ == mixer for block in model.model.layers)  # left as it was


def test_other_models_are_refused() -> None:
    with pytest.raises(UserError, match="attention"):
        record(tiny("attention"), torch.zeros(1, 4, dtype=torch.long))


def test_survival_grows_with_the_disturbance_and_fades() -> None:
    model = tiny("efla")
    ids = torch.randint(0, 50, (4, 64), generator=torch.Generator().manual_seed(1))
    rows = survival(model, ids, (0.0, 0.1, 1.0), seed=0)
    by_size = {size: [r for r in rows if r["size"] == size and r["layer"] == 0] for size in (0.0, 0.1, 1.0)}
    assert by_size[0.0][0]["at_half"] == by_size[0.0][0]["at_end"] == 0
    assert by_size[1.0][0]["at_half"] > by_size[0.1][0]["at_half"] > 0
    assert by_size[1.0][0]["at_end"] < by_size[1.0][0]["at_half"]


def test_command_and_replot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from efla_data.corpus.prepare import prepare

    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"one two three four five " * 20}{n}"}}\n' for n in range(20)))
    recipe = Recipe(sources=[str(text)], tokenizer="train", vocab_size=300, heldout_fraction=0.3)
    prepare(recipe, tmp_path / "tokens", 1)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokens" / "tokenizer")
    tiny("efla", max(tokenizer.get_vocab().values()) + 1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    where = [f"checkpoint={tmp_path / 'model'}", f"data_dir={tmp_path / 'tokens'}", "sequences=2", "device=cpu"]
    assert main.run([*where, f"out={tmp_path / 'a'}", "figures=false"]) == 0
    content = json.loads((tmp_path / "a" / "stability.json").read_text())
    assert content["tokens"] == 16 and len(content["layers"]) == 2
    assert "| layer | head |" in capsys.readouterr().out
    assert main.run([f"replot={tmp_path / 'a' / 'stability.json'}", f"out={tmp_path / 'b'}"]) == 0
    assert (tmp_path / "a" / "stability.md").read_text() == (tmp_path / "b" / "stability.md").read_text()
    assert (tmp_path / "b" / "stability.png").stat().st_size > 1000
    assert main.run([]) == 1
    assert main.run([*where, "tokens=100000"]) == 1
    assert "held-out part has" in capsys.readouterr().err
