"""Text to token files. Start at `prepare`."""
