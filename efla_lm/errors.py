"""The error that a user can fix: shown as one line by every entry point, never as a traceback."""


class UserError(ValueError):
    """Something in the command, the settings or the files is wrong and the user can put it right.

    The message names the key, file or step, says what was expected and what came, and what to do about it.
    Entry points print it as ``error: <message>`` on stderr and exit with code 1 (`efla_lm.settings.entry`).
    """
