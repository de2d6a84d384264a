"""Text to deterministic token files, and token files to batches. Start at `prepare`, `TokenFile` and `TrainLoader`."""

from efla_data.errors import DataError

__all__ = ["DataError"]
