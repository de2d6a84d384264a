"""Losses, gradient checkpointing, and what is computed in fp32 although the model is bf16."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from efla_lm import EflaForCausalLM
from efla_lm.models.layers import Decay, ShortConvolution
from efla_lm.models.mixers.mamba2 import Mamba2Mixer
from efla_lm.models.norm_linear import (
    GatedRMSNorm,
    Linear,
    Normed,
    RMSNorm,
    add_branch,
    add_linear,
    add_normed_linear,
    plus,
    project,
    residual_of,
)
from tests.models.tiny import MODELS, VOCABULARY, tiny_model, tokens

RECURRENT = [mixer for mixer in MODELS if mixer != "attention"]


def gradients(model: EflaForCausalLM, ids: torch.Tensor, **options: object) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(ids, targets=ids.roll(-1, 1), **options).loss
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mixer", MODELS)
def test_targets_are_summed_and_labels_averaged(mixer: str) -> None:
    model = tiny_model(mixer)
    ids = tokens(3, 20)
    logits = model(ids).logits
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, :5] = -100
    expected = F.cross_entropy(logits.flatten(0, 1).double(), targets.flatten(), reduction="sum")
    output = model(ids, targets=targets)
    assert output.logits is None and output.cache is None
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    labels = ids.clone()
    labels[0, :6] = -100
    mean = model(ids, labels=labels)
    assert mean.loss.item() == pytest.approx(expected.item() / int((targets != -100).sum()), rel=1e-5)
    assert mean.logits.shape == (3, 20, VOCABULARY)


def test_all_ignored_is_zero_not_nan() -> None:
    model = tiny_model("efla")
    ignored = torch.full((2, 8), -100)
    assert model(tokens(2, 8), targets=ignored).loss.item() == 0.0
    assert model(tokens(2, 8), labels=ignored).loss.item() == 0.0


def test_losses_that_do_not_fit_are_refused() -> None:
    model = tiny_model("efla")
    with pytest.raises(ValueError, match="not both"):
        model(tokens(1, 4), labels=tokens(1, 4), targets=tokens(1, 4))
    with pytest.raises(ValueError, match=r"targets must be \(1, 4\)"):
        model(tokens(1, 4), targets=tokens(1, 3))
    with pytest.raises(ValueError, match=r"labels must be \(1, 4\)"):
        model(tokens(1, 4), labels=tokens(1, 3))
    with pytest.raises(ValueError, match="exactly one of"):
        model(tokens(1, 4), inputs_embeds=torch.zeros(1, 4, 64))


@pytest.mark.parametrize("mixer", MODELS)
def test_logits_to_keep_and_tuples(mixer: str) -> None:
    model = tiny_model(mixer)
    ids = tokens(2, 9)
    whole = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, whole[:, -1:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 4])).logits, whole[:, [0, 4]])
    assert torch.equal(model(ids, return_dict=False)[0], whole)
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1


@pytest.mark.parametrize("mixer", MODELS)
def test_gradient_checkpointing_changes_nothing(mixer: str) -> None:
    model = tiny_model(mixer, use_cache=True).train()
    ids = tokens(2, 70)
    loss, plain = gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for options in ({}, {"use_cache": True}):
        again, checkpointed = gradients(model, ids, **options)
        assert again == loss
        for name, gradient in plain.items():
            assert torch.equal(gradient, checkpointed[name]), name
    assert model(ids).cache is None
    assert model(ids, use_cache=True).cache is None
    with pytest.raises(ValueError, match="cannot continue from a cache"):
        model(ids, cache=model.new_cache())
    with torch.no_grad():
        assert model(ids, use_cache=True).cache.seen == 70  # nothing is recomputed without gradients


@pytest.mark.parametrize("mixer", MODELS)
def test_checkpointing_recomputes(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(mixer).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = []
    mixer_class = type(model.model.layers[0].mixer)
    forward = mixer_class.forward
    monkeypatch.setattr(mixer_class, "forward", lambda *given: (calls.append(1), forward(*given))[1])
    gradients(model, tokens(1, 6))
    assert len(calls) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("mixer", MODELS)
def test_blocks_compile_once(mixer: str) -> None:
    """One graph serves all blocks, the first as well: starting up is mostly compiling."""
    torch._dynamo.reset()
    model, compiler = tiny_model(mixer).train(), CompileCounter()
    assert len(model.model.layers) > 1
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, fullgraph=True, backend=compiler)
    ids = tokens(2, 20)
    model(ids, targets=ids.roll(-1, 1)).loss.backward()
    assert compiler.frame_count == 1


@pytest.mark.parametrize("mixer", MODELS)
def test_no_cache_in_training_unless_asked(mixer: str) -> None:
    model = tiny_model(mixer)
    assert model(tokens(1, 4)).cache is not None
    assert model.train()(tokens(1, 4)).cache is None
    assert model(tokens(1, 4), use_cache=True).cache.seen == 4


@pytest.mark.parametrize("mixer", RECURRENT)
def test_state_and_loss_are_fp32_in_a_bf16_model(mixer: str) -> None:
    model = tiny_model(mixer).to(torch.bfloat16)
    output = model(tokens(2, 9))
    assert output.logits.dtype == torch.bfloat16
    assert all(layer.state.dtype == torch.float32 for layer in output.cache.layers)
    assert model(tokens(2, 9), targets=tokens(2, 9)).loss.dtype == torch.float32
    assert model(tokens(2, 9), labels=tokens(2, 9)).loss.dtype == torch.float32


@pytest.mark.parametrize("mixer", MODELS)
def test_bf16_is_close_to_fp32(mixer: str) -> None:
    model = tiny_model(mixer).to(torch.bfloat16)
    rounded = model.float()  # the same bf16 values, computed in fp32
    ids = tokens(2, 70)
    with torch.no_grad():
        expected = rounded(ids).logits
        got = model.to(torch.bfloat16)(ids).logits.float()
    assert float((got - expected).norm() / expected.norm()) < 5e-2


def test_decay_of_a_bf16_model_is_computed_in_fp32() -> None:
    decay = Decay(4).to(torch.bfloat16)
    with torch.no_grad():
        decay.A_log.copy_(torch.tensor([-3.0, 0.5, 1.7, 2.7]))
        decay.dt_bias.copy_(torch.tensor([-6.9, -4.0, -2.3, 1.0]))
    a = torch.randn(2, 9, 4, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    log_g = decay(a)
    expected = -decay.A_log.double().exp() * F.softplus(a.double() + decay.dt_bias.double())
    assert log_g.dtype == torch.float32
    torch.testing.assert_close(log_g.double(), expected, rtol=1e-5, atol=0)


def test_mamba2_hands_fp32_parameters_to_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mamba2").to(torch.bfloat16)
    import efla_kernels

    seen = []
    op = efla_kernels.mamba2

    def spy(x: torch.Tensor, dt: torch.Tensor, A_log: torch.Tensor, *rest: torch.Tensor, **options: object) -> object:
        seen.append((A_log.dtype, rest[2].dtype, rest[3].dtype))
        return op(x, dt, A_log, *rest, **options)

    monkeypatch.setattr(efla_kernels, "mamba2", spy)
    model(tokens(1, 4))
    assert seen == [(torch.float32,) * 3] * 2
    assert isinstance(model.model.layers[0].mixer, Mamba2Mixer)


@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_norm_rounds_once(gate_first: bool) -> None:
    """With fp32 inside, a bf16 result is the rounded exact one; a gate rounded on the way would often miss it."""
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(50, 64, generator=generator).to(torch.bfloat16) for _ in range(2))
    norm = GatedRMSNorm(64, 1e-6, gate_first=gate_first).to(torch.bfloat16)
    wide, swish = x.double(), F.silu(gate.double())
    gated = wide * swish if gate_first else wide
    exact = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 if gate_first else swish)
    assert (norm(x, gate) == exact.to(torch.bfloat16)).double().mean() > 0.999


@pytest.mark.parametrize("gate_first", [False, True])
def test_norm_statistics_of_bf16_inputs(gate_first: bool) -> None:
    """4096 equal terms: a bf16 sum of squares would stop growing at 256 of them."""
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    norm = RMSNorm(4096, 1e-6).to(torch.bfloat16)
    torch.testing.assert_close(norm(x), torch.ones_like(x), rtol=4e-3, atol=0)
    gated = GatedRMSNorm(4096, 1e-6, gate_first=gate_first).to(torch.bfloat16)
    gate = torch.full_like(x, 2.0)
    expected = 1.0 if gate_first else 2.0 / (1 + math.exp(-2.0))
    torch.testing.assert_close(gated(x, gate).float(), torch.full((1, 4096), expected), rtol=4e-3, atol=0)


def test_group_norm_of_mamba2_is_per_group() -> None:
    norm = GatedRMSNorm(8, 0.0, gate_first=True, groups=2)
    x = torch.tensor([[1.0, 1, 1, 1, 5, 5, 5, 5]])
    gate = torch.full((1, 8), 20.0)  # silu(20) is 20 to fp32 precision
    torch.testing.assert_close(norm(x, gate), torch.ones(1, 8))


def test_short_convolution_by_hand() -> None:
    layer = ShortConvolution((2,), 3, bias=True)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]]))
        layer.bias.copy_(torch.tensor([0.1, -0.2]))  # type: ignore[union-attr]
    x = torch.tensor([[[1.0, 1.0], [2.0, 0.0], [4.0, -1.0]]])
    sums = torch.tensor([[[3.0, -1.0], [8.0, 0.0], [17.0, 1.5]]]) + torch.tensor([0.1, -0.2])
    y, state = layer(x)
    torch.testing.assert_close(y, F.silu(sums))
    assert torch.equal(state, x[:, 1:])
    tail, _ = layer(x[:, 2:], state=x[:, :2])
    torch.testing.assert_close(tail, y[:, 2:])


def carrying(h: torch.Tensor) -> Normed:
    """The input of a branch that adds h to its result."""
    return Normed(RMSNorm(h.shape[-1], 1e-6), h)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_an_output_norms_weight_goes_into_the_product_behind_it(heads: int, gated: bool) -> None:
    """Same results and gradients; without gradients the norm does all of it."""
    torch.manual_seed(0)
    norm = (GatedRMSNorm if gated else RMSNorm)(8, 1e-6)
    linear = Linear(heads * 8, 5)
    torch.nn.init.normal_(norm.weight)
    inputs = [torch.randn(2, 7, heads, 8, requires_grad=True) for _ in range(1 + gated)]
    leaves = [*inputs, norm.weight, linear.weight]
    h, dy = torch.randn(2, 7, 5), torch.randn(2, 7, 5)
    together, apart = h + linear(norm(*inputs).flatten(2)), add_normed_linear(carrying(h), norm, linear, *inputs)
    torch.testing.assert_close(apart, together, rtol=1e-5, atol=1e-6)
    for got, expected in zip(*(torch.autograd.grad(x, leaves, dy) for x in (apart, together)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(add_normed_linear(carrying(h), norm, linear, *inputs), together)
        assert torch.equal(add_normed_linear(h, norm, linear, *inputs), linear(norm(*inputs).flatten(2)))


@pytest.mark.parametrize("narrow", [0, 1, 2])
def test_linears_behind_a_norm_read_the_residual_itself(narrow: int) -> None:
    """The factors that are left make it the same, gradients included."""
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-6)
    torch.nn.init.normal_(norm.weight)
    wide, gates = [Linear(16, 24), Linear(16, 8)], [Linear(16, 3) for _ in range(narrow)]
    x = torch.randn(2, 7, 16, requires_grad=True)
    back, y = Linear(5, 16), torch.randn(2, 7, 5)
    leaves = [x, norm.weight, back.weight, *(f.weight for f in (*wide, *gates))]
    found = []
    for fuse in (True, False):
        normed = Normed(norm, x) if fuse else norm(x)
        projections = project(normed, wide, gates)
        residual = residual_of(normed) if fuse else x
        assert (projections.row_scale is not None) == fuse == (not isinstance(residual, torch.Tensor))
        results = [plus(residual, 2 * x.detach()), add_linear(normed, back, y) + (0 if fuse else x)]
        results += [*(projections.scaled(z) for z in projections.wide), *projections.narrow]
        slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)) for i, y in enumerate(results)]
        found.append([*results, *torch.autograd.grad(results, leaves, slopes)])
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert reads(norm, x) is torch.Tensor
    assert reads(norm, x) is Normed
    assert reads(norm, x, fuse=False) is torch.Tensor


def reads(norm: RMSNorm, h: torch.Tensor, **options: bool) -> type:
    """What a branch behind `norm` gets."""
    seen: list[type] = []
    add_branch(h, norm, lambda x: (seen.append(type(x)), h)[1], **options)
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_whose_norms_come_first(dtype: torch.dtype) -> None:
    """A long row of fp16 overflows in a product that is normed behind it."""
    norm, linear = RMSNorm(16, 1e-6).to(dtype), Linear(16, 4).to(dtype)
    x = torch.full((1, 2, 16), 6e4, dtype=dtype, requires_grad=True)
    assert reads(norm, x) is torch.Tensor
    back = Linear(4, 16).to(dtype)
    assert (add_branch(x, norm, lambda x: back(linear(x))) - x).isfinite().all()


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("mask", [None, "left", "right"])
def test_a_model_in_training_is_the_model(mixer: str, mask: str | None) -> None:
    """Loss and all gradients against float64, which norms first and multiplies then."""
    model, ids = tiny_model(mixer), tokens(2, 70)
    attention_mask = None
    if mask is not None:
        attention_mask = torch.ones_like(ids)
        attention_mask[0, :9] = 0
        attention_mask = attention_mask if mask == "left" else attention_mask.flip(1)
    loss, found = gradients(model, ids, attention_mask=attention_mask)
    exact, truth = gradients(model.double(), ids, attention_mask=attention_mask)
    assert loss == pytest.approx(exact, rel=1e-6)
    for name, gradient in found.items():
        assert (gradient - truth[name]).norm() <= 1e-5 * truth[name].norm(), name
