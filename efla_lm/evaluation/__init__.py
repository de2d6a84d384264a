"""Evaluation of language models: checkpoints in, numbers that can be trusted out.

`checkpoints` finds and loads a model, `tokens` turns text into ids, `scoring` sums log-probabilities, `harness` is the
face that lm-eval sees, `tasks` and `heldout` bring the documents, `runner` puts them together, `results` writes them.
lm_eval is imported in this folder only, and here not at import time of the package.
"""
