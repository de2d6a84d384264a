"""The model family for transformers: configuration, models, cache, initialisation, counts."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from efla_lm.models import fla_backend as _fla_backend  # noqa: F401  (registers backend "fla")
from efla_lm.models.cache import RecurrentCache
from efla_lm.models.config import EflaConfig, check_vocabulary
from efla_lm.models.counts import count_parameters, flops_per_token
from efla_lm.models.init import initialise
from efla_lm.models.model import EflaBlock, EflaForCausalLM, EflaModel, EflaOutput
from efla_lm.models.rules import RULES, Rule

AutoConfig.register(EflaConfig.model_type, EflaConfig, exist_ok=True)
AutoModel.register(EflaConfig, EflaModel, exist_ok=True)
AutoModelForCausalLM.register(EflaConfig, EflaForCausalLM, exist_ok=True)

__all__ = [
    "RULES",
    "EflaBlock",
    "EflaConfig",
    "EflaForCausalLM",
    "EflaModel",
    "EflaOutput",
    "RecurrentCache",
    "Rule",
    "check_vocabulary",
    "count_parameters",
    "flops_per_token",
    "initialise",
]
