"""Save and load: bit-equal by every path, tied and untied, and a config that refuses typos."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from efla_lm import EflaConfig, EflaForCausalLM, EflaModel, check_vocabulary, initialise
from efla_lm.errors import UserError
from tests.models.tiny import MODELS, VOCABULARY, tiny_config, tiny_model, tokens

PATHS = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "low memory": {"low_cpu_mem_usage": True, "device_map": "cpu"},
    "low memory bf16": {"low_cpu_mem_usage": True, "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_survives(mixer: str, tied: bool, tmp_path: Path) -> None:
    """Trained decay parameters and projections are not drawn anew, whatever the loading path."""
    model = tiny_model(mixer, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    expected = model.state_dict()
    for path, options in PATHS.items():
        dtype = options.get("dtype", torch.float32)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert isinstance(loaded, EflaForCausalLM)
        assert loaded.state_dict().keys() == expected.keys()
        for name, value in loaded.state_dict().items():
            assert value.dtype == dtype, (path, name)
            assert torch.equal(value, expected[name].to(dtype)), (path, name)
        shared = loaded.lm_head.weight.data_ptr() == loaded.get_input_embeddings().weight.data_ptr()
        assert shared == tied, path
        if dtype == torch.float32:
            assert torch.equal(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_auto_model_from_config(mixer: str, tied: bool) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(mixer, tie_word_embeddings=tied))
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert isinstance(AutoModel.from_config(tiny_config(mixer)), EflaModel)


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_state_dict_into_a_model_from_the_meta_device(mixer: str, tied: bool) -> None:
    model = tiny_model(mixer, tie_word_embeddings=tied)
    with torch.device("meta"):
        empty = EflaForCausalLM(model.config)
    empty.to_empty(device="cpu")
    empty.tie_weights()
    empty.load_state_dict(model.state_dict())
    empty.eval()
    assert torch.equal(empty(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
    assert not list(model.buffers()), "a buffer would be lost on the meta device"


@pytest.mark.parametrize("mixer", MODELS)
def test_missing_parameters_alone_are_drawn(mixer: str, tmp_path: Path) -> None:
    """The logic that decides what to initialise works on single parameters, not on whole modules."""
    model = tiny_model(mixer)
    state = model.state_dict()
    endings = ("dt_bias", "mixer_norm.weight")  # dt_bias has neighbours in its module that must stay
    absent = next(name for ending in endings for name in state if name.endswith(ending))
    model.save_pretrained(tmp_path, state_dict={name: value for name, value in state.items() if name != absent})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]) == (name != absent), name
    assert loaded.state_dict()[absent].isfinite().all()


def test_loaded_model_generates_as_before(tmp_path: Path) -> None:
    model = tiny_model("gated_efla")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(loaded.generate(tokens(1, 5), **options), model.generate(tokens(1, 5), **options))


@pytest.mark.parametrize("mixer", MODELS)
def test_config_round_trip(mixer: str, tmp_path: Path) -> None:
    config = tiny_config(mixer, tie_word_embeddings=True, backend="torch", norm_eps=1e-5)
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, EflaConfig)
    for options in (config.to_dict(), config.to_diff_dict()):
        again = EflaConfig(**{key: value for key, value in options.items() if key != "model_type"})
        assert again.to_dict() | {"_name_or_path": ""} == loaded.to_dict() | {"_name_or_path": ""}
    assert loaded.num_attention_heads == loaded.num_heads


def test_config_refuses_what_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"hiden_size.*did you mean 'hidden_size'"):
        EflaConfig(hiden_size=64)
    with pytest.raises(ValueError, match="mixer must be one of"):
        EflaConfig(mixer="mamba")
    with pytest.raises(ValueError, match="no multiple of num_heads"):
        EflaConfig(hidden_size=100, num_heads=3)
    with pytest.raises(ValueError, match="multiple of mamba_head_dim"):
        EflaConfig(mixer="mamba2", hidden_size=100, num_heads=2)
    with pytest.raises(ValueError, match="shared by num_groups"):
        EflaConfig(mixer="mamba2", hidden_size=64, num_heads=2, num_groups=3)
    with pytest.raises(ValueError, match="even head_dim"):
        EflaConfig(mixer="attention", head_dim=33)
    with pytest.raises(ValueError, match="output_gate belongs to"):
        EflaConfig(mixer="attention", output_gate=True)
    for fields in ({"norm_eps": -1.0}, {"rope_theta": 0.0}, {"initializer_range": float("nan")}):
        with pytest.raises(ValueError, match=f"{next(iter(fields))} must be a finite number"):
            EflaConfig(**fields)
    with pytest.raises(ValueError, match="num_heads must be a positive integer"):
        EflaConfig(num_heads=0)
    with pytest.raises(ValueError, match="num_hidden_layers must be a positive integer"):
        EflaConfig(num_hidden_layers=0)
    with pytest.raises(ValueError, match="SDPA"):
        EflaForCausalLM(tiny_config("attention", backend="triton"))


def test_backends_that_cannot_serve_say_why() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        tiny_model("efla", backend="nonsense")(tokens(1, 4))
    for mixer in ("efla", "deltanet", "gated_deltanet"):
        with pytest.raises(ValueError, match="CUDA only, the tensors are on cpu"):
            tiny_model(mixer, backend="fla")(tokens(1, 4))
    for mixer in ("gated_efla", "mamba2"):
        with pytest.raises(ValueError, match=f"'fla' is not built for '{mixer}'"):
            tiny_model(mixer, backend="fla")(tokens(1, 4))


def test_tokenizer_wider_than_the_model_is_refused() -> None:
    config = tiny_config("efla", vocab_size=200)
    check_vocabulary(200, config)
    with pytest.raises(UserError, match=r"259.*200") as refused:
        check_vocabulary(259, config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary_can_be_resized(tied: bool) -> None:
    model = tiny_model("efla", tie_word_embeddings=tied)
    model.resize_token_embeddings(VOCABULARY + 27)
    assert model(tokens(1, 4)).logits.shape[-1] == VOCABULARY + 27
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied


def test_initialise_needs_memory() -> None:
    with torch.device("meta"):
        model = EflaForCausalLM(tiny_config("efla"))
    with pytest.raises(ValueError, match="to_empty"):
        initialise(model, 0)
