"""The cache: a prompt in pieces equals the whole, padding included; what cannot go on is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from efla_lm import EflaForCausalLM
from efla_lm.models.cache import LayerState
from efla_lm.models.sequence import SequenceInfo
from tests.models.tiny import MODELS, left_padded, tiny_model, tokens


def in_pieces(model: EflaForCausalLM, ids: torch.Tensor, cuts: list[int], mask: torch.Tensor | None) -> torch.Tensor:
    """Logits of ids [B, T] fed in pieces that end at `cuts`, each with the mask from the start."""
    cache, logits, start = model.new_cache(), [], 0
    for end in [*cuts, ids.shape[1]]:
        seen = None if mask is None else mask[:, :end]
        output = model(ids[:, start:end], attention_mask=seen, cache=cache)
        logits.append(output.logits)
        cache, start = output.cache, end
    assert cache.seen == ids.shape[1]
    return torch.cat(logits, 1)


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("cuts", [[1], [2], [3], [4], [63], [64], [65], [69], [1, 2, 40], list(range(1, 70))])
def test_prefill_split_anywhere(mixer: str, cuts: list[int]) -> None:
    model = tiny_model(mixer)
    ids = tokens(2, 70)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        torch.testing.assert_close(in_pieces(model, ids, cuts, None), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("cut", [1, 3, 8, 9, 15, 20, 21, 22, 29])
def test_left_padding_in_two_calls_with_the_full_mask(mixer: str, cut: int) -> None:
    """The cut may fall into the padding of a row, on its edge, or after it."""
    model = tiny_model(mixer)
    ids, mask = left_padded([tokens(length, seed=length) for length in (9, 21, 30)])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        pieces = in_pieces(model, ids, [cut], mask)
        first = model(ids[:, :cut], attention_mask=mask, use_cache=True)  # the full mask from the first call on
        second = model(ids[:, cut:], attention_mask=mask, cache=first.cache)
    real = mask.bool()
    torch.testing.assert_close(pieces[real], whole[real], rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1)[real], whole[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mixer", MODELS)
def test_decoding_with_a_mask_of_the_new_tokens_only(mixer: str) -> None:
    model = tiny_model(mixer)
    ids, mask = left_padded([tokens(5), tokens(12)])
    with torch.no_grad():
        whole = model(ids, attention_mask=mask, use_cache=False).logits
        first = model(ids[:, :10], attention_mask=mask[:, :10], use_cache=True)
        second = model(ids[:, 10:], attention_mask=mask[:, 10:], cache=first.cache)
        third = model(ids[:, 10:], attention_mask=None, cache=model(ids[:, :10], attention_mask=mask[:, :10]).cache)
    torch.testing.assert_close(second.logits, whole[:, 10:], rtol=0, atol=1e-4)
    torch.testing.assert_close(third.logits, whole[:, 10:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("mixer", MODELS)
def test_right_padding_scores_but_leaves_no_cache(mixer: str) -> None:
    model = tiny_model(mixer)
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    output = model(ids, attention_mask=mask)
    assert output.cache is None
    torch.testing.assert_close(output.logits[:1, :7], model(ids[:1, :7]).logits, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="padding on the left only"):
        model(ids, attention_mask=mask, use_cache=True)
    with pytest.raises(ValueError, match="padding on the left only"):
        model(ids, attention_mask=mask, cache=model.new_cache())
    begun = model(tokens(2, 3)).cache
    with pytest.raises(ValueError, match="padding on the left only"):
        model(ids, attention_mask=mask.flip(1), cache=begun)


def test_masks_that_do_not_fit_are_refused() -> None:
    model = tiny_model("efla")
    ids = tokens(2, 6)
    holes = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="row 0 has padding between tokens"):
        model(ids, attention_mask=holes)
    with pytest.raises(ValueError, match="expected 6"):
        model(ids, attention_mask=torch.ones(2, 5))
    with pytest.raises(ValueError, match="batch = 2"):
        model(ids, attention_mask=torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"got \(2, 1, 6, 6\)"):
        model(ids, attention_mask=torch.ones(2, 1, 6, 6))


def test_foreign_caches_are_refused() -> None:
    model = tiny_model("efla")
    with pytest.raises(ValueError, match="RecurrentCache"):
        model(tokens(1, 4), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="3 layers, the model has 2"):
        model(tokens(1, 4), cache=tiny_model("efla", num_hidden_layers=3).new_cache())
    with pytest.raises(ValueError, match="two different"):
        model(tokens(1, 4), cache=model.new_cache(), past_key_values=model.new_cache())
    with pytest.raises(ValueError, match="use_cache=False"):
        model(tokens(1, 4), cache=model.new_cache(), use_cache=False)


@pytest.mark.parametrize("mixer", MODELS)
def test_rows_of_the_cache_can_be_selected_and_copied(mixer: str) -> None:
    model = tiny_model(mixer)
    ids, mask = left_padded([tokens(4), tokens(9, seed=1), tokens(7, seed=2)])
    with torch.no_grad():
        cache = model(ids, attention_mask=mask).cache
        following = tokens(3, 2, seed=5)
        untouched = copy.deepcopy(cache)
        expected = model(following, cache=copy.deepcopy(cache)).logits
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        moved = model(following[[2, 0, 0]], cache=cache).logits
        again = model(following, cache=untouched).logits
    torch.testing.assert_close(moved, expected[[2, 0, 0]], rtol=0, atol=1e-5)
    assert torch.equal(again, expected)
    with pytest.raises(ValueError, match="rolled back"):
        cache.crop(-1)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.batch_size == -1
    assert torch.equal(model(ids, attention_mask=mask, cache=cache).logits, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("mixer", [mixer for mixer in MODELS if mixer != "attention"])
def test_padding_on_the_right_leaves_the_state_alone(mixer: str) -> None:
    """Padded tokens neither write nor decay, also where the convolution still carries tokens into them."""
    layer = tiny_model(mixer).model.layers[0].mixer
    hidden = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 7:] = False
    padded, short = LayerState(), LayerState()
    with torch.no_grad():
        for x, info, state in ((hidden, SequenceInfo(2, 12, hidden.device, mask=mask), padded),
                               (hidden[:1, :7], SequenceInfo(1, 7, hidden.device), short)):  # fmt: skip
            layer(x, info, state)
    assert padded.state is not None and short.state is not None
    torch.testing.assert_close(padded.state[:1], short.state, rtol=1e-5, atol=1e-5)
