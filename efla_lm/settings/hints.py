"""Suggestions for names that do not exist: the key of that meaning, else the key of the nearest spelling."""

import difflib
from collections.abc import Iterable

from efla_lm.settings.fields import KeyInfo

NOTES = {
    "epochs": "one epoch is the number of training tokens, which `scripts.inspect_data` prints",
    "batch_size": "it counts tokens: sequences x data.context",
}


def unknown_key(name: str, keys: dict[str, KeyInfo], groups: Iterable[str], program: str) -> str:
    """One line for a key that does not exist, naming the key that is probably meant."""
    last = name.rsplit(".", 1)[-1].lower()
    meant = next((key for key, info in keys.items() if last in info.also_called), None)
    same_name = [key for key in keys if key.rsplit(".", 1)[-1] == last]
    near = meant if meant and not same_name else nearest(name, [*keys, *groups])
    if near is None:
        return f"unknown key {name!r}: no key has a similar name ({program} --help lists every key)"
    note = next((f"; {text}" for word, text in NOTES.items() if near == meant and word in last), "")
    about = f" ({keys[near].help}{note})" if near == meant else ""
    return f"unknown key {name!r}: did you mean {near!r}?{about} ({program} --help lists every key)"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name whose spelling is nearest to `name`, as a whole or in its last part; None if none is near."""
    known = list(known)
    exact = [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
    close = difflib.get_close_matches(name, exact or known, n=1, cutoff=0.0 if exact else 0.6)
    if close:
        return close[0]
    tails = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
    tail = difflib.get_close_matches(name.rsplit(".", 1)[-1], tails, n=1, cutoff=0.7)
    return tails[tail[0]] if tail else None


def near_option(value: str, options: Iterable[str]) -> str | None:
    """The option whose spelling is nearest to `value`; None if none is near."""
    return next(iter(difflib.get_close_matches(value, list(options), n=1, cutoff=0.4)), None)
