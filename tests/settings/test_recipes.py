"""Every file under conf/ composes, and the paper's recipes hold the paper's values."""

import dataclasses
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from efla_lm.errors import UserError
from efla_lm.settings import ExportSettings, PrepareSettings, TrainSettings, UsageError, compose, load_settings, to_yaml
from efla_lm.settings.compose import CONFIG_DIR
from efla_lm.settings.pages import list_groups, read_page

GROUPS = list_groups(CONFIG_DIR, "train")
OPTIONS = [f"{group}={option}" for group, options in GROUPS.items() for option in options]
FAMILIES = GROUPS["model"]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_group_option_composes(option):
    assert isinstance(compose("train", [option], TrainSettings), TrainSettings)


@pytest.mark.parametrize("experiment", GROUPS["experiment"])
@pytest.mark.parametrize("model", FAMILIES)
def test_every_experiment_with_every_family(experiment, model):
    settings = compose("train", [f"experiment={experiment}", f"model={model}"], TrainSettings)
    assert settings.model.mixer == {"transformer": "attention"}.get(model, model)
    assert settings.data.name == ("pydoc" if experiment == "demo" else "slimpajama")


@pytest.mark.parametrize("option", GROUPS["data"])
def test_prepare_reads_the_same_data_section(option):
    prepared = compose("prepare", [f"data={option}"], PrepareSettings)
    assert prepared.data == compose("train", [f"data={option}"], TrainSettings).data


@pytest.mark.parametrize("processes", [0, -1])
def test_prepare_needs_a_process(processes):
    with pytest.raises(UserError, match=f"processes: got {processes}, expected 1 or more"):
        compose("prepare", [f"processes={processes}"], PrepareSettings)


def test_export():
    assert compose("export", ["checkpoint=runs/x"], ExportSettings).checkpoint == str(Path.cwd() / "runs/x")


def test_every_yaml_is_reached():
    """A file that no defaults list names would be a dead option, and a page without groups or values an empty one."""
    commands = [*CONFIG_DIR.parent.glob("*.py"), *CONFIG_DIR.parent.glob("scripts/**/*.py")]
    mains = {name for path in commands for name in re.findall(r'@entry\("(\w+)"', path.read_text())}
    assert {"train", "prepare", "export", "eval", "generate"} <= mains
    for page in CONFIG_DIR.glob("*.yaml"):
        assert list_groups(CONFIG_DIR, page.stem) or read_page(page).keys() - {"defaults"}, f"{page} says nothing"
        assert "_schema" not in page.read_text(), f"{page}: the settings class needs no line in the page"
    groups = {group for page in CONFIG_DIR.glob("*.yaml") for group in list_groups(CONFIG_DIR, page.stem)}
    for path in CONFIG_DIR.rglob("*.yaml"):
        group = str(path.parent.relative_to(CONFIG_DIR))
        assert path.stem in mains if group == "." else group in groups, path


def test_files_hold_only_differences():
    """No YAML value repeats the default that the dataclass owns, unless a comment says why it is pinned."""
    defaults = OmegaConf.to_container(OmegaConf.structured(TrainSettings), resolve=False)
    for group in ("model", "schedule", "parallel", "logger"):
        for path in (CONFIG_DIR / group).glob("*.yaml"):
            lines = path.read_text().splitlines()
            for name, value in (OmegaConf.to_container(OmegaConf.load(path)) or {}).items():
                line = next(line for line in lines if line.startswith(f"{name}:"))
                pinned = "#" in line or name in ("mixer", "kind", "mode")
                assert pinned or value != defaults[group][name], f"{path}: {line}"


@pytest.mark.parametrize(
    ("experiment", "tokens", "batch", "updates", "warmup_tokens", "hidden", "heads"),
    [
        ("table1_340m", 8 * 2**30, 2**20, 8192, 2**30, 1024, 8),
        ("table1_1b3", 50 * 2**30, 2**21, 25600, 2**31, 2048, 16),
    ],
)
def test_paper_recipe(experiment, tokens, batch, updates, warmup_tokens, hidden, heads):
    """arXiv 2512.12602v4, language-model settings; shapes of the public configurations of the field."""
    s = compose("train", [f"experiment={experiment}"], TrainSettings)
    assert (s.train.tokens, s.train.steps, s.train.batch_tokens) == (tokens, None, batch)
    assert tokens / batch == updates
    assert s.schedule.warmup_updates == 1024 and 1024 * batch == warmup_tokens
    assert (s.schedule.kind, s.schedule.peak, s.schedule.initial, s.schedule.final) == ("cosine", 3e-4, 3e-5, 3e-5)
    assert (s.optim.weight_decay, s.train.clip_norm, s.seed) == (0.1, 1.0, 42)
    assert (s.optim.betas, s.optim.eps, s.model.initializer_range) == ([0.9, 0.95], 1e-8, 0.02)
    assert (s.model.head_dim, s.model.conv_size, s.model.vocab_size) == (128, 4, 32000)
    assert (s.model.hidden_size, s.model.num_heads, s.model.num_hidden_layers) == (hidden, heads, 24)
    assert (s.data.context, s.data.tokenizer) == (2048, "mistralai/Mistral-7B-v0.1")
    assert s.model.norm_eps == 1e-6 and not s.model.tie_word_embeddings
    assert s.model.max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("size", "model", "width", "layers"),
    [
        ("340m", "efla", 2816, 24),
        ("340m", "deltanet", 2816, 24),
        ("340m", "transformer", 2816, 24),
        ("340m", "gated_efla", 2432, 24),
        ("340m", "gated_deltanet", 2432, 24),
        ("1b3", "efla", 5632, 24),
        ("1b3", "gated_deltanet", 4992, 24),
        ("340m", "mamba2", None, 48),
        ("1b3", "mamba2", None, 48),
    ],
)
def test_model_and_size_are_chosen_separately(size, model, width, layers):
    s = compose("train", [f"size={size}", f"model={model}"], TrainSettings).model
    assert s.num_hidden_layers == layers
    if width is None:
        assert not s.mlp and (s.expand, s.mamba_head_dim, s.state_size, s.num_groups) == (2, 64, 128, 1)
    else:
        assert s.mlp and s.intermediate_size == width


@pytest.mark.parametrize(
    ("size", "model", "count"),
    [
        ("340m", "efla", 374_362_112),
        ("340m", "gated_efla", 371_413_376),
        ("340m", "transformer", 373_867_520),
        ("1b3", "deltanet", 1_365_677_056),
        ("1b3", "gated_deltanet", 1_372_755_712),
        ("1b3", "transformer", 1_364_297_728),
    ],
)
def test_recipes_give_the_stated_parameter_counts(size, model, count):
    from efla_lm.models import EflaConfig, count_parameters

    s = compose("train", [f"experiment=table1_{size}", f"model={model}"], TrainSettings)
    assert count_parameters(EflaConfig(**dataclasses.asdict(s.model))) == count


def test_smaller_size_makes_a_recipe_a_smoke_run():
    s = compose("train", ["experiment=table1_340m", "size=tiny", "data=pydoc"], TrainSettings)
    assert s.train.batch_tokens == 8192 and s.data.context == 256


def test_dump_is_read_back(tmp_path):
    s = compose("train", ["experiment=table1_1b3", "model=mamba2", "train.steps=7"], TrainSettings)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(s))
    assert load_settings(path, TrainSettings) == s
    assert "${" not in path.read_text()
    path.write_text(path.read_text().replace("seed:", "sede:"))
    with pytest.raises(UsageError, match="sede"):
        load_settings(path, TrainSettings)
    with pytest.raises(FileNotFoundError, match="no such config"):
        load_settings(tmp_path / "none.yaml", TrainSettings)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.steps=10", "train.tokens=100"], ["train.tokens=100", "train.steps=10", "null"]),
        (["train.tokens=null"], ["train.tokens", "train.steps", "neither"]),
        (["train.steps=0"], ["train.steps", "1 or more"]),
        (["train.batch_tokens=4000"], ["train.batch_tokens", "data.context=256", "4096"]),
        (["train.micro_tokens=100"], ["train.micro_tokens", "256"]),
        (["train.micro_batch=1", "train.micro_tokens=512"], ["train.micro_batch=1"]),
        (["train.clip_norm=0"], ["train.clip_norm"]),
        (["data.heldout_fraction=1.5"], ["data.heldout_fraction", "1.5"]),
        (["data.heldout_fraction=0.1", "data.heldout_sources=[a]"], ["data.heldout_sources"]),
        (["data.context=0"], ["data.context"]),
        (["optim.betas=[0.9]"], ["optim.betas", "two"]),
        (["optim.betas=[0.9,1.0]"], ["optim.betas"]),
        (["optim.eps=0"], ["optim.eps"]),
        (["optim.weight_decay=-1"], ["optim.weight_decay"]),
        (["schedule.peak=0"], ["schedule.peak"]),
        (["schedule.final=-1"], ["schedule.final"]),
        (["schedule.final=null"], ["schedule.final", "cosine"]),
        (["schedule=constant", "schedule.final=1e-5"], ["schedule.final", "constant"]),
        (["schedule.decay_fraction=0.1"], ["schedule.decay_fraction", "cosine"]),
        (["schedule=wsd", "schedule.decay_fraction=2"], ["schedule.decay_fraction", "2"]),
        (["parallel=ddp", "parallel.shard=2"], ["parallel.shard", "hsdp"]),
        (["parallel=single", "parallel.world_size=2"], ["parallel.world_size"]),
        (["seed=-1"], ["seed"]),
        (["seed=1e30"], ["seed", "2^63"]),
        (["name=."], ["name", "'.'"]),
        (["name=../x"], ["name", "../x"]),
        (["name="], ["name"]),
    ],
)
def test_values_are_checked_and_named(overrides, words):
    with pytest.raises(UserError) as caught:
        compose("train", overrides, TrainSettings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_checks_change_nothing():
    from copy import deepcopy

    settings = compose("train", [], TrainSettings)
    before = deepcopy(settings)
    settings.validate()
    assert settings == before
