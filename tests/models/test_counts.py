"""Parameter counts of the paper's shapes, and the FLOPs that utilisation is measured against."""

from __future__ import annotations

import pytest

from efla_lm import EflaConfig, count_parameters, flops_per_token

SHAPES = {
    "340m": {"hidden_size": 1024, "num_heads": 8, "head_dim": 128},
    "1b3": {"hidden_size": 2048, "num_heads": 16, "head_dim": 128},
}
MLP = {("340m", False): 2816, ("340m", True): 2432, ("1b3", False): 5632, ("1b3", True): 4992}
EXPECTED = {
    ("340m", "efla"): 374_362_112,
    ("340m", "deltanet"): 374_362_112,
    ("340m", "gated_efla"): 371_413_376,
    ("340m", "gated_deltanet"): 371_413_376,
    ("340m", "attention"): 373_867_520,
    ("1b3", "efla"): 1_365_677_056,
    ("1b3", "deltanet"): 1_365_677_056,
    ("1b3", "gated_efla"): 1_372_755_712,
    ("1b3", "gated_deltanet"): 1_372_755_712,
    ("1b3", "attention"): 1_364_297_728,
}


def paper_config(size: str, mixer: str) -> EflaConfig:
    width = MLP[size, mixer.startswith("gated")]
    layers = 48 if mixer == "mamba2" else 24
    return EflaConfig(mixer=mixer, intermediate_size=width, num_hidden_layers=layers, **SHAPES[size])


@pytest.mark.parametrize(("size", "mixer"), EXPECTED)
def test_counts_are_those_of_the_design(size: str, mixer: str) -> None:
    assert count_parameters(paper_config(size, mixer)) == EXPECTED[size, mixer]


@pytest.mark.parametrize(("size", "share"), [("340m", 0.021), ("1b3", 0.005)])
def test_mamba2_is_close_to_deltanet(size: str, share: float) -> None:
    relative = count_parameters(paper_config(size, "mamba2")) / EXPECTED[size, "deltanet"] - 1
    assert relative == pytest.approx(share, abs=1e-3)


def test_tied_embeddings_count_once() -> None:
    untied = EflaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_heads=2, intermediate_size=96)
    tied = EflaConfig(**{**untied.to_dict(), "tie_word_embeddings": True})
    assert count_parameters(untied) - count_parameters(tied) == 100 * 64


def test_flops_by_hand() -> None:
    config = EflaConfig(vocab_size=100, hidden_size=64, num_hidden_layers=3, num_heads=2, intermediate_size=96)
    multiplied = count_parameters(config) - 100 * 64
    assert flops_per_token(config, 2048) == 6 * multiplied + 3 * 3 * 6 * 2 * 32 * 32
    attention = EflaConfig(**{**config.to_dict(), "mixer": "attention"})
    longer = flops_per_token(attention, 4096) - flops_per_token(attention, 2048)
    assert longer == 3 * 3 * 2 * 64 * 2048
