"""A stack is its models: the same steps as torch's own optimiser, the same blocks as the language model's."""

from __future__ import annotations

import pytest
import torch
from efla_data.tasks.mad import BASELINES
from torch import nn

from efla_lm import EflaConfig
from efla_lm.models.model import EflaBlock
from efla_lm.models.sequence import describe
from scripts.mad import training as mad
from scripts.stacked.modules import StackedAdamW, StackedLinear, StackedModule, initialise, normal


class Net(StackedModule):
    def __init__(self, models: int) -> None:
        super().__init__()
        self.inner = StackedLinear(models, 5, 7, bias=True)
        self.outer = StackedLinear(models, 7, 3, bias=True, draw=normal(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).tanh())


def test_stacked_adamw_is_torchs_adamw_per_model() -> None:
    rates, decays, clip = [1e-3, 3e-2], [0.0, 0.3], 0.05
    stack = Net(2)
    initialise(stack, [0, 1])
    singles = []
    for m in range(2):
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        with torch.no_grad():
            for layer, stacked in ((net[0], stack.inner), (net[2], stack.outer)):
                layer.weight.copy_(stacked.weight[m].T)
                layer.bias.copy_(stacked.bias[m, 0])
        groups = [
            {"params": [net[0].weight, net[2].weight], "weight_decay": decays[m]},
            {"params": [net[0].bias, net[2].bias], "weight_decay": 0.0},
        ]
        singles.append((net, torch.optim.AdamW(groups, lr=rates[m])))
    optimiser = StackedAdamW(stack, rates, decays, decays=lambda name: "bias" not in name, clip_norm=clip)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        x = torch.randn(2, 4, 5, generator=generator)
        stack(x).square().mean((1, 2)).sum().backward()
        optimiser.step()
        for m, (net, single) in enumerate(singles):
            single.zero_grad()
            net(x[m]).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
            single.step()
    for m, (net, _) in enumerate(singles):
        torch.testing.assert_close(stack.inner.weight[m].T, net[0].weight, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(stack.outer.bias[m, 0], net[2].bias, rtol=1e-5, atol=1e-7)


def test_a_diverged_model_leaves_the_others_alone() -> None:
    stack, alone = Net(2), Net(1)
    initialise(stack, [3, 4])
    initialise(alone, [4])
    with torch.no_grad():
        stack.inner.weight[0] = float("nan")
    x = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(1))
    for net, models in ((stack, 2), (alone, 1)):
        optimiser = StackedAdamW(net, [1e-2] * models, [0.0] * models, clip_norm=1.0)
        for _ in range(3):
            net(x.expand(models, -1, -1)).square().mean((1, 2)).sum().backward()
            optimiser.step()
    assert not stack.outer.weight[0].isfinite().any()
    torch.testing.assert_close(stack.outer.weight[1], alone.outer.weight[0])


def test_models_of_one_seed_start_alike() -> None:
    net = Net(3)
    initialise(net, [7, 8, 7])
    assert torch.equal(net.inner.weight[0], net.inner.weight[2])
    assert not torch.equal(net.inner.weight[0], net.inner.weight[1])
    assert not torch.equal(net.inner.weight[0, :3, :3], net.outer.weight[0, :3, :3])


def test_rates_must_fit() -> None:
    with pytest.raises(ValueError, match="one per model"):
        StackedAdamW(Net(2), [1e-3], [0.0])


@torch.no_grad()
def copy_block(stacked: mad.Block, m: int, block: EflaBlock) -> None:
    """Model m of a stacked block into a block of the language model."""

    def linear(target: nn.Linear, source: StackedLinear) -> None:
        target.weight.copy_(source.weight[m].T)

    block.mixer_norm.weight.copy_(stacked.mixer_norm.weight[m])
    block.mlp_norm.weight.copy_(stacked.mlp_norm.weight[m])
    linear(block.mlp.gate_up_proj, stacked.gate_up_proj)
    linear(block.mlp.down_proj, stacked.down_proj)
    mine, theirs = stacked.mixer, block.mixer
    if isinstance(mine, mad.Mamba2Mixer):
        linear(theirs.in_proj, mine.in_proj)
        linear(theirs.out_proj, mine.out_proj)
        theirs.conv.weight.copy_(mine.conv.weight[m])
        theirs.conv.bias.copy_(mine.conv.bias[m])
        theirs.norm.weight.copy_(mine.norm.weight[m])
        for name in ("A_log", "dt_bias", "D"):
            getattr(theirs, name).copy_(getattr(mine.ssd, name)[m])
        return
    for name in ("qkv_proj", "o_proj"):
        linear(getattr(theirs, name), getattr(mine, name))
    linear(theirs.b_proj, mine.gates.beta)
    theirs.qkv_conv.weight.copy_(mine.qkv_conv.weight[m])
    theirs.o_norm.weight.copy_(mine.o_norm.weight[m])
    if mine.g_proj is not None:
        linear(theirs.g_proj, mine.g_proj)
        linear(theirs.a_proj, mine.gates.a_proj)
        theirs.decay.A_log.copy_(mine.gates.A_log[m])
        theirs.decay.dt_bias.copy_(mine.gates.dt_bias[m])


@pytest.mark.parametrize("mixer", mad.RECURRENT_MIXERS)
def test_blocks_are_the_language_models(mixer: str) -> None:
    stack = mad.MadModel(mixer, 2, BASELINES["in_context_recall"])
    initialise(stack, [0, 1])
    config = EflaConfig(
        mixer=mixer, vocab_size=16, hidden_size=mad.WIDTH, num_hidden_layers=1, num_heads=mad.HEADS,
        intermediate_size=mad.MLP, mlp=True, state_size=mad.MAMBA_STATE, norm_eps=mad.EPS,
    )  # fmt: skip
    block = EflaBlock(config)
    copy_block(stack.blocks[0], 1, block)
    x = torch.randn(2, 3, 70, mad.WIDTH, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours = stack.blocks[0](x)[1]
        theirs = block(x[1], describe(3, 70, x.device, None, None, None))
    assert (ours - theirs).norm() / theirs.norm() < 1e-5
    assert (ours - x[1]).norm() > 0.1 * x[1].norm()  # the block does something
