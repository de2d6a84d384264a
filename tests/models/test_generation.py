"""generate: with and without cache, batched and single, under both names of the cache."""

from __future__ import annotations

import pytest
import torch

from efla_lm import EflaForCausalLM, RecurrentCache
from tests.models.tiny import MODELS, left_padded, tiny_model, tokens


def greedy(model: EflaForCausalLM, ids: torch.Tensor, **options: object) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.parametrize("mixer", MODELS)
def test_state_reaches_the_logits(mixer: str) -> None:
    """Guards all tests here: if the past did not matter, a lost cache would go unnoticed."""
    model = tiny_model(mixer)
    ids = tokens(1, 20)
    other = ids.clone()
    other[0, 2] = 3 if ids[0, 2] != 3 else 4
    change = (model(ids).logits[0, -1] - model(other).logits[0, -1]).abs().max()
    assert change > 1e-2, f"token 2 moves the logits 17 tokens later by {change} only"


@pytest.mark.parametrize("mixer", MODELS)
def test_cached_equals_uncached(mixer: str) -> None:
    model = tiny_model(mixer)
    ids = tokens(2, 10)
    assert torch.equal(greedy(model, ids, use_cache=True), greedy(model, ids, use_cache=False))


@pytest.mark.parametrize("mixer", MODELS)
def test_generate_hands_the_cache_on(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call after the first sees one token and a cache that has seen all others."""
    model = tiny_model(mixer)
    seen: list[tuple[int, int]] = []
    forward = model.model.forward

    def spy(**arguments: object) -> object:
        given = arguments["cache"] if arguments["cache"] is not None else arguments["past_key_values"]
        ids = arguments["input_ids"]
        assert isinstance(ids, torch.Tensor)
        seen.append((ids.shape[1], given.seen if isinstance(given, RecurrentCache) else 0))
        return forward(**arguments)

    monkeypatch.setattr(model.model, "forward", spy)
    model.generate(tokens(1, 10), max_new_tokens=4, do_sample=False)
    assert seen == [(10, 0), (1, 10), (1, 11), (1, 12)]


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache_work(mixer: str, name: str) -> None:
    model = tiny_model(mixer)
    ids = tokens(1, 12)
    whole = model(ids, use_cache=False).logits
    first = model(ids[:, :7])
    assert first.cache is first.past_key_values
    second = model(ids[:, 7:], **{name: first.cache})
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), whole, rtol=0, atol=1e-4)


def test_unknown_keyword_is_refused() -> None:
    model = tiny_model("efla")
    with pytest.raises(TypeError, match="use_output_norm"):
        model(tokens(1, 4), use_output_norm=True)
    with pytest.raises(ValueError, match="attention_maks"):
        model.generate(tokens(1, 4), max_new_tokens=1, attention_maks=torch.ones(1, 4))


@pytest.mark.parametrize("mixer", MODELS)
def test_left_padded_batch_equals_single_prompts(mixer: str) -> None:
    model = tiny_model(mixer)
    rows = [tokens(length, seed=length) for length in (3, 9, 30)]
    ids, mask = left_padded(rows)
    together = model(ids, attention_mask=mask).logits
    generated = greedy(model, ids, attention_mask=mask)
    for row, logits, continued in zip(rows, together, generated, strict=True):
        alone = model(row[None]).logits[0]
        torch.testing.assert_close(logits[-len(row) :], alone, rtol=0, atol=1e-4)
        assert torch.equal(continued[-12:], greedy(model, row[None])[0, -12:])


@pytest.mark.parametrize("mixer", MODELS)
def test_pad_tokens_themselves_do_not_matter(mixer: str) -> None:
    model = tiny_model(mixer)
    ids, mask = left_padded([tokens(4), tokens(11)])
    noisy = torch.where(mask.bool(), ids, torch.full_like(ids, 7))
    first, second = model(ids, attention_mask=mask).logits, model(noisy, attention_mask=mask).logits
    assert torch.equal(first[mask.bool()], second[mask.bool()])


@pytest.mark.parametrize("mixer", MODELS)
def test_sampling_repeats_with_a_seed_and_without_cache(mixer: str) -> None:
    model = tiny_model(mixer)
    drawn = []
    for use_cache in (True, True, False):
        torch.manual_seed(3)
        drawn.append(model.generate(tokens(2, 8), max_new_tokens=8, do_sample=True, top_k=20, use_cache=use_cache))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("mixer", MODELS)
def test_beam_search_reorders_the_cache(mixer: str) -> None:
    model = tiny_model(mixer)
    ids, mask = left_padded([tokens(5), tokens(9)])
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, **options, use_cache=False))


@pytest.mark.parametrize("mixer", MODELS)
def test_conversation_goes_on_from_the_returned_cache(mixer: str) -> None:
    model = tiny_model(mixer)
    ids = tokens(1, 6)
    first = greedy(model, ids, return_dict_in_generate=True)
    turn = torch.cat((first.sequences, tokens(1, 5, seed=9)), 1)
    # The last generated token was never fed; the cache has seen everything before it.
    assert first.past_key_values.seen == first.sequences.shape[1] - 1
    continued = greedy(model, turn, past_key_values=first.past_key_values)
    assert torch.equal(continued, greedy(model, turn, use_cache=False))


def test_prompt_as_embeddings() -> None:
    model = tiny_model("efla")
    ids = tokens(1, 6)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(greedy(model, None, inputs_embeds=embedded), greedy(model, ids)[:, 6:])  # type: ignore[arg-type]
