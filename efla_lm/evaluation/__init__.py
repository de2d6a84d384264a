"""Evaluation of language models by lm-eval.

`checkpoints` finds and loads a model, `tokens` turns text into ids, `scoring` sums log-probabilities, `harness` is the
model that lm-eval calls, `tasks` and `heldout` load documents, `runner` runs tasks on a model, `results` writes the
numbers. `live` evaluates a model in training. Only modules of this folder import lm_eval, which takes seconds.
"""
