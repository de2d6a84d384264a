"""A fact that two classes need is declared in one of them, or a test holds the two together."""

import dataclasses
import inspect

from efla_data.corpus.recipe import Recipe

from efla_lm.models import EflaConfig
from efla_lm.settings import DataSettings, ModelSettings, TrainSettings, compose, list_keys


def test_model_keys_are_the_fields_of_the_model_config() -> None:
    """Same names, and the same defaults where a key does not follow the size, the data or the family."""
    parameters = inspect.signature(EflaConfig.__init__).parameters
    for name, info in list_keys(ModelSettings).items():
        assert name in parameters, f"model.{name} is no field of EflaConfig"
        follows = isinstance(info.default, str) and "${" in info.default
        if not follows and parameters[name].default is not None and name != "vocab_size":  # null: the tokenizer's
            assert info.default == parameters[name].default, name
    settings = compose("train", ["model.vocab_size=300"], TrainSettings).model
    config = EflaConfig(**dataclasses.asdict(settings))
    for name in list_keys(ModelSettings):
        assert getattr(settings, name) in (None, getattr(config, name)), name


def test_data_settings_are_a_recipe() -> None:
    """Every key of the recipe reaches the recipe that is prepared."""
    settings = compose("train", ["data.bos=true", "data.sources=[/a]", "data.revision=x"], TrainSettings).data
    recipe = settings.recipe()
    assert type(recipe) is Recipe and isinstance(settings, Recipe)
    for field in dataclasses.fields(Recipe):
        assert getattr(recipe, field.name) == getattr(settings, field.name)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    own = {field.name for field in dataclasses.fields(Recipe)}
    assert own & set(DataSettings.__annotations__) == {"heldout_fraction"}  # another default
