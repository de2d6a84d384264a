"""docs/configuration.md is what the settings classes say, and names every key."""

from efla_lm.settings import list_keys
from scripts.reference import PAGE, commands, write


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == write(), "docs/configuration.md is old: python -m scripts.reference"


def test_every_key_of_every_command_is_there() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert {"python train.py", "python eval.py", "python -m scripts.prepare"} <= set(commands())
    for call, entry in commands().items():
        assert f"## `{call}`" in text
        for name, info in list_keys(entry.settings_class).items():
            assert info.help, f"{call}: {name} has no line of help"
            head, _, leaf = name.rpartition(".")
            assert f"`{name}`" in text or (head and f".{leaf}`" in text), f"{call}: {name}"
