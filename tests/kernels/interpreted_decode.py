"""The fused decoding kernel in Triton's interpreter; run by test_triton.py in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import efla_kernels
import pytest
import torch
from efla_kernels.delta_rule import choices
from efla_kernels.delta_rule import decode_kernel as decode
from efla_kernels.launch.choices import interpreted

from efla_lm import EflaForCausalLM
from efla_lm.models.cache import LayerState
from efla_lm.models.config import EflaConfig
from efla_lm.models.sequence import SequenceInfo
from tests.kernels.decode_inputs import RULES, decode_inputs

assert interpreted(), "these tests need TRITON_INTERPRET=1"


SHAPES: tuple[dict[str, int], ...] = (
    {},
    {"key_width": 24, "value_width": 40, "taps": 3},
    {"key_width": 256, "value_width": 128},
    {"key_width": 16, "value_width": 200, "taps": 2},
    {"key_width": 1, "value_width": 1, "heads": 1},
    {"key_width": 33, "value_width": 65, "batch": 1},
    {"key_width": 7, "value_width": 129},
)


@pytest.mark.parametrize("processors", [0, 132])
@pytest.mark.parametrize("gated_norm", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_kernel_equals_the_pytorch_form(
    monkeypatch: pytest.MonkeyPatch, rule: str, gated_norm: bool, processors: int
) -> None:
    """In the blocks of few programs, and in those of more programs than there are multiprocessors."""
    monkeypatch.setattr(decode, "PROCESSORS", processors)
    for shape in SHAPES:
        results = []
        for backend in ("torch", "triton"):
            tensors, options = decode_inputs(rule, gated_norm, **shape)
            y = efla_kernels.decode_step(rule, **tensors, **options, backend=backend)
            results.append((y, tensors["state"], tensors["conv_state"]))
        for got, expected in zip(results[1], results[0], strict=True):
            assert (got - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", RULES)
def test_16_bit_inputs_are_widened(rule: str, dtype: torch.dtype) -> None:
    """The kernel has sums where the interpreter's bf16 products would be garbage; S stays fp32."""
    for shape in ({}, {"key_width": 33, "value_width": 65}):
        tensors, options = decode_inputs(rule, True, dtype=dtype, **shape)
        wide = {name: x.double() for name, x in tensors.items()}
        more = {name: x.double() for name, x in options.items()}
        expected = efla_kernels.decode_step(rule, **wide, **more, backend="torch")
        y = efla_kernels.decode_step(rule, **tensors, **options, backend="triton")
        assert y.dtype == dtype and (y - expected).norm() <= 1e-2 * expected.norm()
        assert tensors["state"].dtype == torch.float32
        assert (tensors["state"] - wide["state"]).norm() <= 1e-2 * wide["state"].norm()
        assert torch.equal(tensors["conv_state"].double(), wide["conv_state"])


@pytest.mark.parametrize("mixer", RULES)
def test_kernel_equals_the_layers_own_step(mixer: str) -> None:
    """A mixer's T = 1 path from a filled cache, in fp32: output, S and the convolution's inputs."""
    torch.manual_seed(0)
    config = EflaConfig(mixer=mixer, hidden_size=32, num_heads=2, head_dim=16, vocab_size=16, backend="torch")
    layer = config.rule.mixer_class()(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    cache = LayerState()
    hidden = torch.randn(2, 6, 32)

    with torch.no_grad():
        layer(hidden[:, :5], SequenceInfo(2, 5, hidden.device), cache)
        conv_state, state, x = cache.conv.clone(), cache.state.clone(), hidden[:, 5]
        expected = layer(hidden[:, 5:], SequenceInfo(2, 1, hidden.device, past=5), cache)
        options = {}
        if layer.decay is not None:
            options = {"decay_logit": layer.a_proj(x), "A_log": layer.decay.A_log, "dt_bias": layer.decay.dt_bias}
        if layer.g_proj is not None:
            options["output_gate"] = layer.g_proj(x).unflatten(-1, (2, 16))
        y = efla_kernels.decode_step(
            mixer, layer.qkv_proj(x), conv_state, layer.qkv_conv.weight, layer.b_proj(x), state, layer.o_norm.weight,
            norm_eps=config.norm_eps, backend="triton", **options,
        )  # fmt: skip
        got = layer.o_proj(y.flatten(1))
    torch.testing.assert_close(got, expected[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, cache.state, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(conv_state, cache.conv)


@pytest.mark.parametrize("mixer", RULES)
def test_a_model_decodes_with_the_kernel(monkeypatch: pytest.MonkeyPatch, mixer: str) -> None:
    """Four tokens after a prefill: logits equal to those of backend torch, one kernel call per layer and token."""
    calls = []
    own = decode.decode_eagerly
    monkeypatch.setattr(decode, "decode_eagerly", lambda *a: (calls.append(1), own(*a))[1])
    logits = {}
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        config = EflaConfig(
            mixer=mixer, vocab_size=40, hidden_size=32, num_hidden_layers=2, num_heads=2, head_dim=16,
            intermediate_size=32, backend=backend,
        )  # fmt: skip
        model = EflaForCausalLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        ids = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            out = model(ids[:, :5], use_cache=True)
            steps = [out.logits[:, -1]]
            for t in range(5, 9):
                out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
                steps.append(out.logits[:, -1])
        logits[backend] = torch.stack(steps)
    assert len(calls) == 2 * 4
    torch.testing.assert_close(logits["triton"], logits["torch"], rtol=1e-4, atol=1e-4)


def test_registration() -> None:
    tensors, options = decode_inputs("gated_efla", True)
    t, o = tensors, options
    arguments = (
        t["x"], t["conv_state"], t["conv_weight"], t["beta_logit"], o["decay_logit"], o["A_log"], o["dt_bias"],
        t["state"], t["norm_weight"], o["output_gate"], choices.MODES["gated_efla"], 0.35, 1e-6,
    )  # fmt: skip
    torch.library.opcheck(decode.decode, arguments)
