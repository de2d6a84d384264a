"""State-space duality's Triton kernels in compiled layers and in a model; run as `interpreted_ssd.py` is."""

from __future__ import annotations

import pytest
import torch
from efla_kernels import mamba2
from efla_kernels.ssd import triton_op as ssd_ops
from torch import Tensor, nn

from efla_lm.models import EflaConfig, EflaForCausalLM


class Layer(nn.Module):
    """A projection, the op and a projection back: what a compiled model sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 2 * 16 + 2 * 16 + 2)
        self.outer = nn.Linear(2 * 16, 16)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.randn(2)) for _ in range(3))

    def forward(self, u: Tensor) -> Tensor:
        x, B, C, dt = self.inner(u).split([32, 16, 16, 2], -1)
        x, B, C = x.unflatten(-1, (2, 16)), B.unsqueeze(2), C.unsqueeze(2)
        y, _ = mamba2(x, dt, self.A_log, B, C, self.D, self.dt_bias, backend="triton")
        return self.outer(y.flatten(2))


def test_compiled_whole_with_changing_lengths() -> None:
    torch.manual_seed(0)
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (66, 130, 40):
        u = torch.randn(1, tokens, 16)
        results = []
        for module in (layer, compiled):
            leaf = u.clone().requires_grad_()
            y = module(leaf)
            results.append((y, *torch.autograd.grad(y.square().sum(), (leaf, *layer.parameters()))))
        for got, expected in zip(results[1], results[0], strict=True):
            assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_a_model_trains_and_decodes_with_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of a whole model and four tokens after a prefill, equal to backend torch; one step per layer, token."""
    calls = []
    own = ssd_ops.step
    monkeypatch.setattr(ssd_ops, "step", lambda *a: (calls.append(1), own(*a))[1])
    found = {}
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        config = EflaConfig(
            mixer="mamba2", vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=16, mamba_head_dim=16,
            num_groups=2, backend=backend, mlp=False,
        )  # fmt: skip
        model = EflaForCausalLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        ids = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(1))
        model(ids, labels=ids).loss.backward()
        grads = [p.grad for p in model.parameters()]
        with torch.no_grad():
            out = model(ids[:, :5], use_cache=True)
            steps = [out.logits[:, -1]]
            for t in range(5, 9):
                out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
                steps.append(out.logits[:, -1])
        found[backend] = [torch.stack(steps), *grads]
    assert len(calls) == 2 * 4
    for got, expected in zip(found["triton"], found["torch"], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
