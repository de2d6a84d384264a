"""The frame that all studies share: result file, launcher, table, plot, progress line, checks of settings."""
