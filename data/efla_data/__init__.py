"""Text to deterministic token files, and token files to batches. Start at `prepare`, `TokenFile` and `WindowLoader`."""

from efla_data.errors import DataError

__all__ = ["DataError"]
