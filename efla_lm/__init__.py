"""efla-lm: pretrain, evaluate and study linear-attention language models.

Importing the package registers the model family with transformers' Auto classes.
"""

from efla_lm.models import (
    EflaConfig,
    EflaForCausalLM,
    EflaModel,
    RecurrentCache,
    check_vocabulary,
    count_parameters,
    flops_per_token,
    initialise,
)

__all__ = [
    "EflaConfig",
    "EflaForCausalLM",
    "EflaModel",
    "RecurrentCache",
    "check_vocabulary",
    "count_parameters",
    "flops_per_token",
    "initialise",
]
