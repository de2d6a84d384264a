"""Tiny models whose mixers matter: every parameter is moved away from its initial value."""

from __future__ import annotations

import torch

from efla_lm import EflaConfig, EflaForCausalLM, initialise
from efla_lm.models.rules import RULES

MODELS = tuple(RULES)
VOCABULARY = 101


def tiny_config(mixer: str, **changes: object) -> EflaConfig:
    """2 layers, hidden 64, 2 heads of 32; weights large enough that states and attention move the logits."""
    shape: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "intermediate_size": 96,
        "mamba_head_dim": 32,
        "state_size": 16,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return EflaConfig(mixer=mixer, **(shape | changes))  # type: ignore[arg-type]


def perturb(model: torch.nn.Module, seed: int = 1) -> None:
    """Move every parameter, so that none has a value that an initialisation would give it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


def tiny_model(mixer: str, seed: int = 0, **changes: object) -> EflaForCausalLM:
    """A perturbed tiny model in evaluation mode."""
    model = EflaForCausalLM(tiny_config(mixer, **changes))
    initialise(model, seed)
    perturb(model)
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids without the pad id."""
    return torch.randint(2, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and mask [B, longest] of rows of different lengths."""
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    return ids, mask
