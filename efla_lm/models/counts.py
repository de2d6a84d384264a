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
    Mixing adds, per block and forward, 3x that with backward:

    * delta rules 6 H K V: read k^T S, rank-one update, read q^T S of the recurrence (chunked forms compute more);
    * Mamba-2 4 H N P: update and read;
    * attention 2 H K context: scores and values over context / 2 visible keys on average.
    """
    parameters = count_parameters(config)
    if not config.tie_word_embeddings:
        parameters -= config.vocab_size * config.hidden_size
    if config.mixer == "mamba2":
        mixing = 4 * config.inner_size * config.state_size
    elif config.mixer == "attention":
        mixing = 2 * config.key_size * context
    else:
        mixing = 6 * config.key_size * config.head_dim
    return float(6 * parameters + 3 * mixing * config.num_hidden_layers)
