"""Packed documents (cu_seqlens) equal separate documents: states, convolution, attention, gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.models.tiny import MODELS, tiny_model, tokens

OFFSETS = [0, 5, 5, 6, 70, 75]  # an empty document, one of 1 token, one longer than a chunk


def documents(offsets: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in pairwise(offsets) if b > a]


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("with_mask", [False, True])
def test_packed_logits_equal_separate_ones(mixer: str, with_mask: bool) -> None:
    """An all-ones mask beside cu_seqlens must not replace the boundaries."""
    model = tiny_model(mixer)
    ids = tokens(1, 75)
    mask = torch.ones_like(ids) if with_mask else None
    packed = model(ids, cu_seqlens=torch.tensor(OFFSETS, dtype=torch.int32), attention_mask=mask).logits
    separate = torch.cat([model(ids[:, a:b]).logits for a, b in documents(OFFSETS)], 1)
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-4)
    assert (model(ids).logits - packed).abs().max() > 1e-2, "the documents must influence each other without boundaries"


@pytest.mark.parametrize("mixer", MODELS)
def test_packed_gradients_equal_separate_ones(mixer: str) -> None:
    model = tiny_model(mixer).train()
    ids, targets = tokens(1, 75), tokens(1, 75, seed=1)
    model(ids, targets=targets, cu_seqlens=torch.tensor(OFFSETS)).loss.backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    sum(model(ids[:, a:b], targets=targets[:, a:b]).loss for a, b in documents(OFFSETS)).backward()
    for name, parameter in model.named_parameters():
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(packed[name], parameter.grad, rtol=0, atol=float(1e-4 * scale + 1e-6), msg=name)


def test_boundaries_that_do_not_fit_are_refused() -> None:
    model = tiny_model("efla")
    ids = tokens(1, 6)
    for offsets in ([0, 3], [1, 6], [0, 4, 3, 6], [0, 7]):
        with pytest.raises(ValueError, match="rise from 0 to 6"):
            model(ids, cu_seqlens=torch.tensor(offsets))
    with pytest.raises(ValueError, match="batch size 1, got 2"):
        model(tokens(2, 6), cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="carries no padding"):
        model(ids, cu_seqlens=torch.tensor([0, 6]), attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="no cu_seqlens"):
        model(ids, cu_seqlens=torch.tensor([0, 6]), use_cache=True)
    with pytest.raises(ValueError, match="do not go together"):
        model(ids, cu_seqlens=torch.tensor([0, 6]), cache=model.new_cache())
    with pytest.raises(ValueError, match="integer offsets"):
        model(ids, cu_seqlens=torch.tensor([0.0, 6.0]))
