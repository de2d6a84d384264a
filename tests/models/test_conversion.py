"""Conversions to and from transformers and flash-linear-attention: names, configurations, equal logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM

from efla_lm import EflaForCausalLM
from efla_lm.errors import UserError
from efla_lm.models.conversion import from_layout, to_layout
from scripts import convert
from tests.models.tiny import VOCABULARY, perturb, tiny_config, tiny_model

IDS = torch.randint(0, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(0))

# Names of flash-linear-attention 0.6.0's parameters, one block, from fla/models/*/modeling_*.py, fla/layers/ (mamba2,
# delta_net, gated_deltanet) and fla/modules/mlp.py. Shapes at the sizes of `tiny_config`.
FLA_MAMBA2 = {
    "backbone.embeddings.weight": (101, 64),
    "backbone.layers.0.norm.weight": (64,),
    "backbone.layers.0.mixer.dt_bias": (4,),
    "backbone.layers.0.mixer.A_log": (4,),
    "backbone.layers.0.mixer.D": (4,),
    "backbone.layers.0.mixer.conv1d.weight": (160, 1, 4),
    "backbone.layers.0.mixer.conv1d.bias": (160,),
    "backbone.layers.0.mixer.in_proj.weight": (292, 64),
    "backbone.layers.0.mixer.norm.weight": (128,),
    "backbone.layers.0.mixer.out_proj.weight": (64, 128),
    "backbone.norm_f.weight": (64,),
    "lm_head.weight": (101, 64),
}
FLA_DELTANET = {
    "model.embeddings.weight": (101, 64),
    "model.layers.0.attn_norm.weight": (64,),
    "model.layers.0.attn.q_proj.weight": (64, 64),
    "model.layers.0.attn.k_proj.weight": (64, 64),
    "model.layers.0.attn.v_proj.weight": (64, 64),
    "model.layers.0.attn.b_proj.weight": (2, 64),
    "model.layers.0.attn.q_conv1d.weight": (64, 1, 4),
    "model.layers.0.attn.k_conv1d.weight": (64, 1, 4),
    "model.layers.0.attn.v_conv1d.weight": (64, 1, 4),
    "model.layers.0.attn.o_norm.weight": (32,),
    "model.layers.0.attn.o_proj.weight": (64, 64),
    "model.layers.0.mlp_norm.weight": (64,),
    "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.norm.weight": (64,),
    "lm_head.weight": (101, 64),
}
FLA_GATED_DELTANET = FLA_DELTANET | {
    "model.layers.0.attn.a_proj.weight": (2, 64),
    "model.layers.0.attn.A_log": (2,),
    "model.layers.0.attn.dt_bias": (2,),
    "model.layers.0.attn.g_proj.weight": (64, 64),
}
FLA = {"mamba2": FLA_MAMBA2, "deltanet": FLA_DELTANET, "gated_deltanet": FLA_GATED_DELTANET}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def theirs(**changes: Any) -> Mamba2ForCausalLM:
    """A tiny Mamba-2 of transformers, every parameter moved."""
    shape = {
        "num_heads": 4, "head_dim": 32, "vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 16,
        "num_hidden_layers": 2, "n_groups": 1, "initializer_range": 0.15, "chunk_size": 16,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**{**shape, **changes}))
    perturb(model)
    return model


@pytest.mark.parametrize("changes", [{}, {"n_groups": 2}, {"tie_word_embeddings": True}, {"conv_kernel": 3}])
def test_from_transformers_with_equal_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    source = theirs(**changes)
    source.save_pretrained(tmp_path / "theirs")
    arguments = [f"checkpoint={tmp_path / 'theirs'}", "to=efla_lm", f"out={tmp_path / 'ours'}"]
    assert convert.main.run(arguments) == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(ours, EflaForCausalLM) and ours.config.mixer == "mamba2"
    torch.testing.assert_close(logits(ours), logits(source), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"num_groups": 2}, {"tie_word_embeddings": True}, {"norm_eps": 1e-4}])
def test_to_transformers_with_equal_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    source = tiny_model("mamba2", **changes)
    source.save_pretrained(tmp_path / "ours")
    arguments = [f"checkpoint={tmp_path / 'ours'}", "to=transformers", f"out={tmp_path / 'theirs'}"]
    assert convert.main.run(arguments) == 0
    loaded, report = Mamba2ForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(logits(loaded), logits(source), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", FLA)
def test_names_and_shapes_are_those_of_fla(mixer: str) -> None:
    model = tiny_model(mixer, num_hidden_layers=1)
    _, state = to_layout("fla", model.config, model.state_dict())
    assert {name: tuple(x.shape) for name, x in state.items()} == FLA[mixer]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mixer", FLA)
def test_there_and_back_by_way_of_fla(mixer: str, tied: bool, tmp_path: Path) -> None:
    """The same configuration, the same bits, the same logits; q, k and v in their order."""
    source = tiny_model(mixer, tie_word_embeddings=tied)
    source.save_pretrained(tmp_path / "ours")
    assert convert.main.run([f"checkpoint={tmp_path / 'ours'}", "to=fla", f"out={tmp_path / 'fla'}"]) == 0
    state = load_file(tmp_path / "fla" / "model.safetensors")
    assert ("lm_head.weight" in state) != tied
    if mixer != "mamba2":
        q, k, v = (state[f"model.layers.1.attn.{x}_proj.weight"] for x in "qkv")
        assert torch.equal(torch.cat((q, k, v)), source.model.layers[1].mixer.qkv_proj.weight)
    assert convert.main.run([f"checkpoint={tmp_path / 'fla'}", "to=efla_lm", f"out={tmp_path / 'back'}"]) == 0
    back = EflaForCausalLM.from_pretrained(tmp_path / "back")
    unread = {"num_heads", "head_dim", "intermediate_size"} if mixer == "mamba2" else {"state_size", "mamba_head_dim"}
    ours, again = source.config.to_dict(), back.config.to_dict()
    assert {k for k, v in again.items() if ours.get(k) != v} <= {"architectures", "dtype", "_name_or_path", *unread}
    for name, x in source.state_dict().items():
        assert torch.equal(back.state_dict()[name], x), name
    assert torch.equal(logits(back), logits(source))


@pytest.mark.parametrize("mixer", FLA)
def test_fla_accepts_the_configuration(mixer: str, tmp_path: Path) -> None:
    """fla's own classes read the folder and find every parameter; its kernels need a GPU (tests/gpu/test_models.py)."""
    models = pytest.importorskip("fla.models")
    source = tiny_model(mixer)
    source.save_pretrained(tmp_path / "ours")
    convert.to_others(str(tmp_path / "ours"), "fla", tmp_path / "fla")
    name = {"mamba2": "Mamba2", "deltanet": "DeltaNet", "gated_deltanet": "GatedDeltaNet"}[mixer]
    config = getattr(models, f"{name}Config").from_pretrained(tmp_path / "fla")
    built = getattr(models, f"{name}ForCausalLM")(config)
    expected = {key: tuple(x.shape) for key, x in built.state_dict().items()}
    state = load_file(tmp_path / "fla" / "model.safetensors")
    assert {key: tuple(x.shape) for key, x in state.items()} == expected
    again, _ = from_layout(config.to_dict(), state)
    assert again.hidden_size == source.config.hidden_size and again.norm_eps == source.config.norm_eps


def test_widths_that_fla_derives() -> None:
    """hidden_ratio in place of intermediate_size, as fla's published DeltaNets have it."""
    given, state = to_layout("fla", tiny_config("deltanet", num_hidden_layers=1), {"model.embeddings.weight": IDS})
    given |= {"intermediate_size": None, "hidden_ratio": 4, "hidden_size": 1024, "num_heads": 8}
    config, _ = from_layout(given, state)
    assert config.intermediate_size == 2816 and config.head_dim == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gla"}, "expected one of mamba2, delta_net, gated_deltanet, got 'gla'"),
        ({"use_bias": True}, "use_bias=True: our model has only use_bias=False"),
        ({"rmsnorm": False}, "rmsnorm=False"),
        ({"dt_limit": [0.0, 0.5]}, "a limit of the step sizes, 0 to 0.5"),
        ({"n_groups": ...}, "no key n_groups"),
    ],
)
def test_what_ours_does_not_have_is_refused(changes: dict[str, Any], message: str) -> None:
    model = tiny_model("mamba2")
    given, state = to_layout("fla", model.config, model.state_dict())
    given = {k: v for k, v in {**given, **changes}.items() if v is not ...}
    with pytest.raises(UserError, match=message):
        from_layout(given, state)


def test_models_without_a_counterpart_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("efla")
    with pytest.raises(UserError, match="fla has no counterpart of efla"):
        to_layout("fla", model.config, model.state_dict())
    model.save_pretrained(tmp_path / "ours")
    assert convert.main.run([f"checkpoint={tmp_path / 'ours'}", "to=efla_lm", f"out={tmp_path / 'x'}"]) == 1
    assert "got 'efla_lm'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_damaged_folders_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("mamba2")
    given, state = to_layout("transformers", model.config, model.state_dict())
    state = {name: x.contiguous() for name, x in state.items()}
    folder, out = tmp_path / "theirs", tmp_path / "out"
    assert convert.main.run([f"checkpoint={folder}", "to=efla_lm", f"out={out}"]) == 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given))
    assert convert.main.run([f"checkpoint={folder}", "to=efla_lm", f"out={out}"]) == 1
    del state["backbone.layers.1.mixer.D"]
    save_file(state, folder / "model.safetensors")
    assert convert.main.run([f"checkpoint={folder}", "to=efla_lm", f"out={out}"]) == 1
    said = capsys.readouterr().err
    assert "expected a folder with config.json" in said and "no safetensors file" in said
    assert "model.layers.1.mixer.D should be (4,), is missing" in said
    assert not out.exists()
