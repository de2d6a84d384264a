"""The factorial of DeltaNet and EFLA in language modelling; `python -m scripts.lm_study` has the command."""
