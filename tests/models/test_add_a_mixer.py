"""The worked example of docs/add_a_mixer.md does what the page says that a mixer must."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from efla_lm import EflaForCausalLM, count_parameters, initialise
from efla_lm.models.rules import RULES, Rule
from efla_lm.training.build import backend_in_use
from tests.models.tiny import left_padded, tiny_config, tiny_model, tokens

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_mixer.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def retention(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("retention")
    exec(compile(code, "docs/add_a_mixer.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "retention", module)
    row = Rule("Retention", "#117733", "retention:RetentionMixer", op="delta_rule", option="retention")
    monkeypatch.setitem(RULES, "retention", row)


def test_it_trains_from_the_meta_device() -> None:
    config = tiny_config("retention", initializer_range=0.02)
    assert backend_in_use(config, torch.device("cpu")) == "torch"
    with torch.device("meta"):
        model = EflaForCausalLM(config)
    model.to_empty(device="cpu")
    initialise(model, 0)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(config)
    ids = tokens(4, 33)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids[:, :-1], targets=ids[:, 1:]).loss / ids[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_padding_and_cuts_of_the_prompt_change_nothing() -> None:
    model = tiny_model("retention")
    rows = [tokens(n, seed=n) for n in (3, 9, 30)]
    ids, mask = left_padded(rows)
    logits = model(input_ids=ids, attention_mask=mask).logits
    for row, text in enumerate(rows):
        torch.testing.assert_close(logits[row, -len(text) :], model(input_ids=text[None]).logits[0], atol=1e-4, rtol=0)
    cache = model(input_ids=ids[:, :12], attention_mask=mask[:, :12], use_cache=True).cache
    rest = model(input_ids=ids[:, 12:], attention_mask=mask, cache=cache).logits
    torch.testing.assert_close(rest, logits[:, 12:], atol=1e-4, rtol=0)


def test_generation_with_and_without_cache() -> None:
    model = tiny_model("retention")
    texts = [
        model.generate(tokens(2, 9), max_new_tokens=12, do_sample=False, use_cache=cached) for cached in (True, False)
    ]
    assert torch.equal(texts[0], texts[1])


def test_every_file_of_the_table_exists() -> None:
    for path in re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE):
        if "NAME" not in path:
            assert (ROOT / path).is_file(), path
