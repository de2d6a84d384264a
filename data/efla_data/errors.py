"""The one exception of this package that a user can put right."""


class DataError(ValueError):
    """A fault in files, settings or a tokenizer. The message names the file or key, what was expected and what came."""
