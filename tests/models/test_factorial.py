"""DeltaNet, EFLA and the two models between them: {beta, 1 - exp(-beta |k|^2)} x {v, v / |k|} on unit keys."""

from __future__ import annotations

import efla_kernels
import pytest
import torch
from torch import Tensor

from efla_lm import EflaForCausalLM
from efla_lm.models.rules import RULES
from tests.models.tiny import tiny_config, tiny_model, tokens

CORNERS = {"deltanet": (False, False), "efla_gate": (True, False), "efla_value": (False, True), "efla": (True, True)}


def by_definition(corner: str, q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> Tensor:
    """The recurrence on unit keys k^, with gate and values as the corner's name says; no coefficient of ours."""
    saturates, scaled = CORNERS[corner]
    norm = k.square().sum(-1, keepdim=True).sqrt()
    gate, unit = torch.sigmoid(logit), k / norm
    if saturates:
        gate = 1 - torch.exp(-gate * norm[..., 0].square())
    if scaled:
        v = v / norm
    state = torch.zeros(*k.shape[:1], k.shape[2], k.shape[3], v.shape[3], dtype=k.dtype)
    outputs = []
    for t in range(k.shape[1]):
        key, write = unit[:, t], gate[:, t, :, None]
        missed = v[:, t] - torch.einsum("bhk,bhkv->bhv", key, state)
        state = state + torch.einsum("bhk,bhv->bhkv", key, write * missed)
        query = q[:, t] / q[:, t].norm(dim=-1, keepdim=True)
        outputs.append(torch.einsum("bhk,bhkv->bhv", query, state) * k.shape[3] ** -0.5)
    return torch.stack(outputs, 1)


def by_model(corner: str, q: Tensor, k: Tensor, v: Tensor, logit: Tensor, backend: str) -> Tensor:
    """What the mixer of this model does with q, k, v and beta's logit."""
    rule = RULES[corner]
    if rule.value_power:
        v = efla_kernels.scaled_values(v, k, rule.value_power)
    return getattr(efla_kernels, rule.op)(q, k, v, logit, backend=backend)[0]


def inputs(norm: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 80, 2, 16)] * 3 + [(2, 80, 2)]
    q, k, v, logit = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    lengths = norm * torch.rand(2, 80, 2, 1, generator=generator, dtype=torch.float64).add(0.5)
    return [10 * q, lengths * k / k.norm(dim=-1, keepdim=True), v, logit]


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("norm", [1.0, 8.0])
@pytest.mark.parametrize("corner", CORNERS)
def test_outputs_and_gradients_follow_the_definition_in_float64(corner: str, norm: float, backend: str) -> None:
    given = inputs(norm)
    weight = torch.randn(2, 80, 2, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for run in (lambda *x: by_definition(corner, *x), lambda *x: by_model(corner, *x, backend)):
        leaves = [x.clone().requires_grad_() for x in given]
        o = run(*leaves)
        found.append([o.detach(), *torch.autograd.grad((o * weight).sum(), leaves)])
    # the ops add 1e-6 to squared norms, of which those of keys are the smallest here: 0.25
    for expected, ours in zip(*found):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_the_corners_take_the_values_as_they_are() -> None:
    assert [RULES[name].value_power for name in CORNERS] == [0, 1, -1, 0]
    assert [RULES[name].op for name in CORNERS] == ["deltanet", "efla", "deltanet", "efla"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("corner", ["efla_gate", "efla_value"])
def test_keys_of_no_length_give_finite_outputs_and_gradients(corner: str, dtype: torch.dtype) -> None:
    q, k, v, logit = (x.to(dtype) for x in inputs(1.0))
    k[:, ::3] = 0
    k[:, 1::3] *= 1e-3
    leaves = [x.requires_grad_() for x in (q, k, v, logit)]
    o = by_model(corner, *leaves, "torch")
    assert o.dtype == dtype
    for x in (o, *torch.autograd.grad(o.float().sum(), leaves)):
        assert x.isfinite().all()


def test_scaled_values_name_what_they_take() -> None:
    with pytest.raises(ValueError, match="power: expected 1 or -1, got 2"):
        efla_kernels.scaled_values(torch.ones(1, 1), torch.ones(1, 1), 2)


def test_all_four_have_the_same_parameters_and_start() -> None:
    models = {name: tiny_model(name) for name in CORNERS}
    first = dict(models["deltanet"].named_parameters())
    for model in models.values():
        assert all(torch.equal(p, first[name]) for name, p in model.named_parameters())
        assert sum(1 for _ in model.parameters()) == len(first)
    ids = tokens(2, 40)
    logits = [model(input_ids=ids).logits for model in models.values()]
    assert all(not torch.allclose(a, b, atol=1e-3) for i, a in enumerate(logits) for b in logits[:i])


@pytest.mark.parametrize("corner", ["efla_gate", "efla_value"])
def test_the_kernel_s_inputs_alone_differ(corner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer of the factorial is its op's mixer with other values: undoing the scale gives that model to the bit."""
    model = tiny_model(corner)
    plain = EflaForCausalLM(tiny_config(str(RULES[corner].op))).eval()
    plain.load_state_dict(model.state_dict())
    ids = tokens(2, 40)
    assert not torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    monkeypatch.setattr(efla_kernels, "scaled_values", lambda v, k, power: v)
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
