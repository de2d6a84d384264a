"""The run directory and what is written to it: checkpoints, metrics, exports."""
