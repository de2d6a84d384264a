"""Sequence mixers, one file per family; `efla_lm.models.rules` says which model has which."""
