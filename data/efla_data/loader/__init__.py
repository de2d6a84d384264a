"""Token files to batches. Start at `batches`."""
