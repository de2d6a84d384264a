"""No dead options: every key is read by the code that it is for.

Training and preparation run on recording settings; a key that nobody reads fails here. The checks of values are not
counted, nor is the dump into the run directory.
"""

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest

from efla_lm.settings import PrepareSettings, TrainSettings, compose, list_keys, to_yaml
from efla_lm.settings.compose import CONFIG_DIR

from .recording import recording

SMALLEST = [
    "size.hidden_size=32",
    "size.num_heads=1",
    "size.head_dim=32",
    "size.layers=1",
    "size.mlp=32",
    "data.context=32",
]


def test_recorder_sees_reads_and_only_reads():
    settings = compose("train", [], TrainSettings)
    read: set[str] = set()
    recorded = recording(settings, read)
    assert isinstance(recorded, TrainSettings)
    to_yaml(recorded)
    assert read == set()
    assert recorded.optim.eps == 1e-8 and recorded.seed == 42
    assert read == {"optim", "optim.eps", "seed"}
    dataclasses.asdict(recorded.schedule)
    assert {"schedule.kind", "schedule.peak"} <= read


def test_every_key_of_a_size_is_referred_to():
    """Keys of a size are read by reference from other sections, never by code (but its name)."""
    defaults = [info.default for info in list_keys(TrainSettings).values()]
    text = "".join(str(d) for d in defaults) + "".join(path.read_text() for path in CONFIG_DIR.glob("model/*.yaml"))
    referred = set(re.findall(r"\$\{(size\.\w+)\}", text))
    assert referred == {name for name in list_keys(TrainSettings) if name.startswith("size.")} - {"size.name"}


@pytest.fixture
def fake_tracker(monkeypatch):
    """A tracker that takes anything: what counts here is which settings reach it."""
    calls = {}
    run = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None, define_metric=lambda *_, **__: None)
    module = SimpleNamespace(
        init=lambda **arguments: calls.update(arguments) or run,
        Settings=lambda **_: None,
        errors=SimpleNamespace(Error=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


@pytest.mark.timeout(180)
def test_every_key_is_read_by_preparation_or_training(tmp_path, monkeypatch, fake_tracker):
    from scripts.prepare import main as prepare
    from train import main as train

    monkeypatch.chdir(tmp_path)
    read: set[str] = set()
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "{"one two three four five " * 40}{n}"}}\n' for n in range(20)))
    data = ["data=local", "data.sources=[text.jsonl]", "data.vocab_size=300", "data.heldout_fraction=0.2"]
    prepared = recording(compose("prepare", data, PrepareSettings), read)
    assert (prepare.work(prepared) or 0) == 0
    mixed = ["data.packing=documents", "data.mixture=[data/tokens/local]", "data.weights=[1]"]
    for more in (["schedule=cosine"], ["schedule=wsd", *mixed]):
        overrides = [
            *data, *SMALLEST, *more, "logger=wandb", "train.steps=3", "train.batch_tokens=128", "train.micro_tokens=64",
            "schedule.warmup_updates=1", "train.validate_every=1", "train.device=cpu",
            "eval.every=2", "eval.tasks=[heldout]",
        ]  # fmt: skip
        assert (train.work(recording(compose("train", overrides, TrainSettings), read)) or 0) == 0
    assert fake_tracker["project"] == "efla-lm"
    keys = {*list_keys(TrainSettings), *list_keys(PrepareSettings)}
    unread = {name for name in keys - read if not name.startswith("size.")}
    assert unread == set()
