"""Parameters and FLOPs of a model, computed from its config."""

from __future__ import annotations

import torch

from efla_lm.models.config import EflaConfig
from efla_lm.models.model import EflaForCausalLM


def count_parameters(config: EflaConfig) -> int:
    """Number of parameters, embeddings included, tied weights once; built on the meta device."""
    with torch.device("meta"):
        model = EflaForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(config: EflaConfig, context: int) -> float:
    """Model FLOPs of one training token (forward and backward, no recomputation), for model FLOPs utilisation.

    Every parameter but an untied embedding table is multiplied and added once forward and twice backward: 6 each.
    Mixing adds what each mixer's `flops_per_token` says per block and forward, 3x that with backward.
    """
    parameters = count_parameters(config)
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size
    mixing = config.rule.mixer_class().flops_per_token(config, context)
    return float(6 * parameters + 3 * mixing * config.num_hidden_layers)
