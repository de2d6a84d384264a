"""The frame that studies share: result files, small models side by side, progress, checks of settings."""
