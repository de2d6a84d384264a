"""Keywords that transformers' Trainer, pipelines and adapters give to `forward`: honoured, or refused when they ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.evaluation.material import make_tokenizer
from tests.models.tiny import MODELS, left_padded, tiny_model, tokens


@pytest.mark.parametrize("mixer", MODELS)
def test_attention_weights_are_refused_only_where_they_are_asked_for(mixer: str) -> None:
    model, ids = tiny_model(mixer), tokens(2, 9)
    expected = model(ids).logits
    for given in (None, False):
        assert torch.equal(model(ids, output_attentions=given).logits, expected)
    with pytest.raises(ValueError, match="output_attentions=True"):
        model(ids, output_attentions=True)


@pytest.mark.parametrize("key", ["output_hidden_states", "return_dict"])
def test_the_config_decides_where_a_call_does_not(key: str) -> None:
    model, ids = tiny_model("efla"), tokens(2, 9)
    asked = model(ids, output_hidden_states=True)
    setattr(model.config, key, key == "output_hidden_states")
    for network in (model, model.model):
        found = network(ids)
        if key == "return_dict":
            assert isinstance(found, tuple) and not isinstance(network(ids, return_dict=True), tuple)
        else:
            assert all(map(torch.equal, found.hidden_states, asked.hidden_states))
            assert network(ids, output_hidden_states=False).hidden_states is None
    assert model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3).shape == (2, 12)


@pytest.mark.parametrize("mixer", MODELS)
def test_shifted_labels_and_divisors(mixer: str) -> None:
    """Gradients of a batch in parts equal those of the whole: Trainer gives all parts the number of all labels."""
    model, ids = tiny_model(mixer), tokens(4, 20)
    labels = ids.clone()
    labels[0, 4:] = -100
    labels[2, :9] = -100
    following = F.pad(labels[:, 1:], (0, 1), value=-100)
    count = (following != -100).sum()

    def gradients(*parts: dict[str, Any]) -> list[torch.Tensor]:
        losses = [model(**part).loss for part in parts]
        return list(torch.autograd.grad(sum(losses), list(model.parameters())))

    whole = gradients({"input_ids": ids, "labels": labels})
    ways = [
        [{"input_ids": ids, "shift_labels": following}],
        [{"input_ids": ids, "labels": labels, "shift_labels": following}],
        [{"input_ids": i[None], "labels": x[None], "num_items_in_batch": count} for i, x in zip(ids, labels)],
        [{"input_ids": i, "shift_labels": x, "num_items_in_batch": int(count)}
         for i, x in zip(ids.split(2), following.split(2))],
    ]  # fmt: skip
    for parts in ways:
        for got, expected in zip(gradients(*parts), whole, strict=True):
            assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert model.accepts_loss_kwargs  # Trainer counts labels for such models only
    with pytest.raises(ValueError, match="not both"):
        model(ids, shift_labels=following, targets=following)
    with pytest.raises(ValueError, match=r"labels must be \(4, 20\)"):
        model(ids, shift_labels=following[:, 1:])


@pytest.mark.parametrize("mixer", MODELS)
def test_positions_that_rise_by_one_change_nothing(mixer: str) -> None:
    model = tiny_model(mixer)
    ids, mask = left_padded([tokens(3), tokens(9)])
    expected = model(ids, attention_mask=mask).logits
    for padded in (0, 1):
        positions = (mask.long().cumsum(1) - 1).masked_fill(mask == 0, padded)
        assert torch.equal(model(ids, attention_mask=mask, position_ids=positions).logits, expected)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(ids, position_ids=packed)
    with pytest.raises(ValueError, match=r"position_ids must be \[2, 9\]"):
        model(ids, position_ids=packed[:, 1:])
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert model(ids[:1], position_ids=packed[:1], cu_seqlens=starts).logits.isfinite().all()


@pytest.mark.parametrize("mixer", MODELS)
def test_stop_strings(mixer: str) -> None:
    """generate keeps the tokenizer among the model's arguments."""
    tokenizer = make_tokenizer(False)
    model, ids = tiny_model(mixer, vocab_size=len(tokenizer)), tokens(1, 9)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    free = model.generate(ids, **options)[0]
    stop = next(character for character in tokenizer.decode(free[9:]) if character.isascii())
    length = next(n for n in range(10, len(free) + 1) if stop in tokenizer.decode(free[9:n]))
    stopped = model.generate(ids, **options, stop_strings=[stop], tokenizer=tokenizer)
    assert torch.equal(stopped[0], free[:length])
