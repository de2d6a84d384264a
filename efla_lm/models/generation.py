"""What `generate` of transformers needs from a model that makes its own cache."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationMixin
from transformers.utils import ModelOutput

# transformers renamed the argument during version 5
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


class RecurrentGeneration(GenerationMixin):
    """The first forward pass returns a `RecurrentCache`; generate passes it back with each further token.

    It is passed as `CACHE_ARGUMENT`, the name in the installed transformers. Under the other name it would be lost
    without an error, and every token would start from an empty state.
    """

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # generate would make a DynamicCache, which cannot hold a recurrent state
        return False

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # generate inspects the signature
    def prepare_inputs_for_generation(self, input_ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs.pop("cache_position", None)  # passed by earlier releases; the cache counts its tokens
        inputs.pop("tokenizer", None)  # of stop_strings, for generate itself
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
