"""How the model takes part in transformers' `generate`."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.utils import ModelOutput

# transformers renamed the argument during version 5; generate must find the cache under the name it knows.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


class RecurrentGeneration(GenerationMixin):
    """`generate` with a cache that the model makes itself.

    The first forward pass makes a `RecurrentCache` and returns it, generate hands it back with each further token.
    Which name it goes by is this module's concern alone: a model that merely accepts the wrong one would start from an
    empty state at every token, without an error.
    """

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # Keeps generate from making a DynamicCache, which has no place for a recurrent state.
        return False

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # generate reads the signature
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs.pop("cache_position", None)  # earlier releases pass it; the cache counts its tokens itself
        return inputs

    def _update_model_kwargs_for_generation(
        self,
        outputs: ModelOutput,
        model_kwargs: dict[str, Any],
        is_encoder_decoder: bool = False,
        num_new_tokens: int = 1,
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, is_encoder_decoder=is_encoder_decoder, num_new_tokens=num_new_tokens
        )
        if outputs.get("cache") is not None:
            model_kwargs.pop("cache", None)
            model_kwargs[CACHE_ARGUMENT] = outputs["cache"]
        return model_kwargs
