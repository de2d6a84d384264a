"""The same computation as the field's: weights of other implementations, copied over, give the same logits.

transformers' Mamba-2 and Llama run on a CPU as they are. flash-linear-attention's layers do not (Triton), so their
computation is written here from torch modules and fla's token-by-token recurrences.
"""

from __future__ import annotations

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from efla_lm import EflaForCausalLM
from efla_lm.models.rules import RULES
from tests.models.tiny import VOCABULARY, perturb, tiny_model, tokens


def assert_same_logits(ours: EflaForCausalLM, theirs: Tensor, ids: Tensor) -> None:
    torch.testing.assert_close(ours(ids).logits, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_that_of_transformers(groups: int) -> None:
    from transformers import Mamba2Config, Mamba2ForCausalLM
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    if groups > 1 and "group_size" not in inspect.signature(MambaRMSNormGated).parameters:
        pytest.skip("this release of transformers normalises over all groups at once, unlike the published Mamba-2")
    theirs = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16,
            n_groups=groups, expand=2, conv_kernel=4, chunk_size=32, layer_norm_epsilon=1e-5, residual_in_fp32=False,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        theirs.backbone.layers[0].mixer.dt_bias.fill_(0.5)
    perturb(theirs)
    ours = tiny_model("mamba2", num_groups=groups, norm_eps=1e-5)
    state = {}
    for name, value in theirs.state_dict().items():
        name = re.sub(r"^backbone\.(layers\.\d+)\.norm\.", r"model.\1.mixer_norm.", name)
        name = (
            name.replace("backbone.norm_f.", "model.norm.").replace("backbone.", "model.").replace(".conv1d.", ".conv.")
        )
        state[name] = value.squeeze(1) if name.endswith("conv.weight") else value
    ours.load_state_dict(state)
    ids = tokens(2, 70)
    assert_same_logits(ours, theirs(ids).logits, ids)


def test_attention_is_that_of_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=96,
            rms_norm_eps=1e-6, initializer_range=0.15, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    perturb(theirs)
    source, state = theirs.state_dict(), {}
    state["model.embeddings.weight"] = source["model.embed_tokens.weight"]
    state["model.norm.weight"], state["lm_head.weight"] = source["model.norm.weight"], source["lm_head.weight"]
    for layer in range(2):
        old, new = f"model.layers.{layer}.", f"model.layers.{layer}."
        attention = [source[f"{old}self_attn.{p}_proj.weight"] for p in "qkv"]
        state[f"{new}mixer.qkv_proj.weight"] = torch.cat(attention)
        state[f"{new}mixer.o_proj.weight"] = source[f"{old}self_attn.o_proj.weight"]
        state[f"{new}mlp.gate_up_proj.weight"] = torch.cat(
            [source[f"{old}mlp.{p}_proj.weight"] for p in ("gate", "up")]
        )
        state[f"{new}mlp.down_proj.weight"] = source[f"{old}mlp.down_proj.weight"]
        state[f"{new}mixer_norm.weight"] = source[f"{old}input_layernorm.weight"]
        state[f"{new}mlp_norm.weight"] = source[f"{old}post_attention_layernorm.weight"]
    ours = tiny_model("attention")
    ours.load_state_dict(state)
    ids = tokens(2, 70)
    assert_same_logits(ours, theirs(ids).logits, ids)


class PlainBlock(nn.Module):
    """One block of a delta-rule model with separate projections, Conv1d, and a recurrence in a Python loop."""

    def __init__(self, ours: nn.Module, mixer: str, heads: int) -> None:
        super().__init__()
        self.ours, self.mixer, self.heads = ours, mixer, heads

    def convolved(self, x: Tensor) -> list[Tensor]:
        mixer = self.ours.mixer
        parts = []
        projections = zip(mixer.qkv_proj.weight.chunk(3), mixer.qkv_conv.weight.chunk(3), strict=True)
        for projection, taps in projections:
            conv = nn.Conv1d(
                len(taps), len(taps), taps.shape[1], groups=len(taps), padding=taps.shape[1] - 1, bias=False
            )
            conv.weight = nn.Parameter(taps[:, None])
            y = conv((x @ projection.T).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
            parts.append(F.silu(y).unflatten(-1, (self.heads, -1)))
        return parts

    def forward(self, hidden: Tensor) -> Tensor:
        mixer, mlp = self.ours.mixer, self.ours.mlp
        x = F.rms_norm(hidden, (64,), self.ours.mixer_norm.weight, 1e-6)
        o = self.recurrence(*self.convolved(x), x)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + 1e-6) * mixer.o_norm.weight
        if RULES[self.mixer].gated:
            o = o * F.silu((x @ mixer.g_proj.weight.T).unflatten(-1, (self.heads, -1)))
        hidden = hidden + o.flatten(2) @ mixer.o_proj.weight.T
        x = F.rms_norm(hidden, (64,), self.ours.mlp_norm.weight, 1e-6)
        gate, up = mlp.gate_up_proj.weight.chunk(2)
        return hidden + (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.down_proj.weight.T

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        """The four rules as their papers write them, one token at a time."""
        mixer = self.ours.mixer
        beta = torch.sigmoid(x @ mixer.b_proj.weight.T)
        q = q / (q.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
        g = torch.ones_like(beta)
        if RULES[self.mixer].gated:
            dt = F.softplus(x @ mixer.a_proj.weight.T + mixer.decay.dt_bias)
            g = (-mixer.decay.A_log.exp() * dt).exp()
        if "deltanet" in self.mixer:
            k = k / (k.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
            erase, write, decay = beta, beta, g
        elif self.mixer == "efla":
            lam = k.pow(2).sum(-1)
            erase = write = (1 - (-beta * lam).exp()) / lam
            decay = g
        else:
            lam = k.pow(2).sum(-1)
            eta = (1 - g) + g * beta * lam
            erase, write, decay = (1 - (-g * beta * lam).exp()) / lam, beta * (1 - (-eta).exp()) / eta, (g - 1).exp()
        B, T, H, K = k.shape
        S, outputs = k.new_zeros(B, H, K, K), []
        for t in range(T):
            kt, vt, qt = k[:, t, :, :, None], v[:, t, :, None, :], q[:, t, :, :, None]
            erased = S - erase[:, t, :, None, None] * kt @ (kt.mT @ S)
            S = decay[:, t, :, None, None] * erased + write[:, t, :, None, None] * kt @ vt
            outputs.append((S.mT @ qt).squeeze(-1) * K**-0.5)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("mixer", ["efla", "gated_efla", "deltanet", "gated_deltanet"])
def test_delta_models_are_those_of_the_papers(mixer: str) -> None:
    ours = tiny_model(mixer).double()
    ids = tokens(2, 70)
    hidden = ours.model.embeddings(ids)
    for block in ours.model.layers:
        hidden = PlainBlock(block, mixer, 2)(hidden)
    expected = F.rms_norm(hidden, (64,), ours.model.norm.weight, 1e-6) @ ours.lm_head.weight.T
    torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_recurrences_are_those_of_fla(gated: bool) -> None:
    """The ops under our mixers against fla's own token-by-token functions, on the same tensors."""
    import efla_kernels

    naive = pytest.importorskip("fla.ops.delta_rule.naive").delta_rule_recurrence
    naive_gated = pytest.importorskip("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 70, 2, 32, generator=generator) for _ in range(3))
    logit, log_g = torch.randn(2, 70, 2, generator=generator), -torch.rand(2, 70, 2, generator=generator)
    normal = [x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    if gated:
        expected, state = naive_gated(*normal, v, beta=logit.sigmoid(), g=log_g, output_final_state=True)
        ours, our_state = efla_kernels.gated_deltanet(q, k, v, logit, log_g, output_final_state=True)
    else:
        swapped = (x.transpose(1, 2) for x in (*normal, v, logit.sigmoid()))
        expected, state = naive(*swapped)
        expected = expected.transpose(1, 2)
        ours, our_state = efla_kernels.deltanet(q, k, v, logit, output_final_state=True)
    torch.testing.assert_close(ours, expected.to(ours), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(our_state, state.to(our_state), rtol=1e-4, atol=1e-5)
