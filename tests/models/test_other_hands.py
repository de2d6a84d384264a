"""What others do to a model: maps in the place of ours, autocast around it, weights that come when they are used."""

from __future__ import annotations

import efla_kernels
import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn
from torch.nn.utils import prune

from efla_lm.models.norm_linear import GatedRMSNorm, Linear, RMSNorm
from tests.models.tiny import MODELS, tiny_model, tokens


class Adapted(nn.Module):
    """A linear map with a low-rank term beside it, as adapters put it into a model: it takes one input alone."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("mixer", MODELS)
def test_other_maps_may_stand_in_the_place_of_ours(mixer: str) -> None:
    """They see what the norms give, weights included, and their own parameters count, with gradients and without."""
    model = tiny_model(mixer)
    generator = torch.Generator().manual_seed(0)
    maps = [name for name, module in model.named_modules() if isinstance(module, Linear) and name != "lm_head"]
    for name in maps:
        model.set_submodule(name, Adapted(model.get_submodule(name)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    ids = tokens(2, 9)
    with torch.no_grad():
        expected = model(ids).logits
    got = model(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    got.square().sum().backward()
    assert all(model.get_submodule(name).up.weight.grad.abs().max() > 0 for name in maps)


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("kind", ["pre", "post", "backward"])
def test_modules_with_hooks_are_called(mixer: str, kind: str) -> None:
    """In training too, where a norm or a map is else used by its weight alone; the numbers stay what they are."""
    model, ids = tiny_model(mixer), tokens(2, 9)
    expected = model(ids, targets=ids).loss
    expected.backward()
    truth = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    called: list[str] = []
    hooked = {
        name: module
        for name, module in model.model.layers.named_modules()
        if isinstance(module, Linear | RMSNorm | GatedRMSNorm)
    }
    for name, module in hooked.items():
        if kind == "backward":
            module.register_full_backward_hook(lambda *_, name=name: called.append(name))
        elif kind == "post":
            module.register_forward_hook(lambda *_, name=name: called.append(name))
        else:
            module.register_forward_pre_hook(lambda *_, name=name: called.append(name))
    loss = model(ids, targets=ids).loss
    loss.backward()
    assert sorted(called) == sorted(hooked)
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        assert (parameter.grad - truth[name]).norm() <= 1e-5 * truth[name].norm(), name


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("called", ["none", "readers", "adders"])
def test_one_side_of_the_stream_is_called(mixer: str, called: str) -> None:
    """The maps that read the stream, or those that add to it, while the others are used by their weights: gradients,
    those of hidden states too, are what they are where all are called."""
    model, ids = tiny_model(mixer), tokens(2, 9)
    modules = {name: x for name, x in model.model.layers.named_modules() if isinstance(x, Linear | RMSNorm)}
    adders = {x for name, x in modules.items() if name.endswith(("o_proj", "out_proj", "down_proj"))}
    readers = set(modules.values()) - adders
    found = []
    for hooked in ({"none": set(), "readers": readers, "adders": adders}[called], readers | adders):
        handles = [module.register_forward_hook(lambda *_: None) for module in hooked]
        output = model(ids, targets=ids, output_hidden_states=True)
        loss = output.loss + sum(x.sin().sum() for x in output.hidden_states)
        found.append(torch.autograd.grad(loss, [*output.hidden_states, *model.parameters()]))
        for handle in handles:
            handle.remove()
    for got, expected in zip(*found, strict=True):
        assert (got - expected).norm() <= 2e-4 * expected.norm()  # sums of gates in fp32


@pytest.mark.parametrize("mixer", MODELS)
def test_pruned_maps(mixer: str) -> None:
    """Pruning makes a map's weight in a hook: a second update must see the first one's, and the mask."""
    model, ids = tiny_model(mixer), tokens(2, 9)
    maps = [module for module in model.model.layers.modules() if isinstance(module, Linear)]
    for module in maps:
        prune.random_unstructured(module, "weight", amount=0.5)
    for _ in range(2):
        model.zero_grad()
        loss = model(ids, targets=ids).loss
        loss.backward()
        with torch.no_grad():
            torch.testing.assert_close(loss, model(ids, targets=ids).loss)
            for module in maps:
                assert not module.weight_orig.grad[module.weight_mask == 0].any()
                module.weight_orig -= 1e-3 * module.weight_orig.grad


@pytest.mark.parametrize("mixer", MODELS)
def test_other_norms_may_stand_in_the_place_of_ours(mixer: str) -> None:
    model, ids = tiny_model(mixer), tokens(2, 9)
    expected = model(ids, targets=ids).loss
    for name, module in list(model.model.layers.named_modules()):
        if type(module) is RMSNorm:
            other = nn.RMSNorm(module.weight.shape, eps=module.eps)
            other.load_state_dict(module.state_dict())
            model.model.layers.set_submodule(name, other)
    loss = model(ids, targets=ids).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("mixer", MODELS)
def test_autocast(mixer: str) -> None:
    """fp32 weights under a 16-bit autocast, as transformers' Trainer has it."""
    model, ids = tiny_model(mixer), tokens(2, 70)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=5e-3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("mixer", MODELS)
def test_offloaded_weights(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate has a module's weights on the device while its forward runs, and no numbers in them else."""
    monkeypatch.setattr(efla_kernels, "fuses_decoding", lambda *_: True)  # as with the kernels
    model, ids = tiny_model(mixer), tokens(2, 9)

    def answer() -> Tensor:
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)

    with torch.no_grad():
        expected, answered = model(ids).logits, answer()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected) and torch.equal(answer(), answered)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
