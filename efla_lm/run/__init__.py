"""The files of a run: checkpoints and what they are checked by."""
