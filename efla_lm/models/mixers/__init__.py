"""Sequence mixers: one class per family, chosen by `config.mixer`."""

from __future__ import annotations

from torch import nn

from efla_lm.models.config import EflaConfig
from efla_lm.models.mixers.attention import AttentionMixer
from efla_lm.models.mixers.delta import DeltaMixer
from efla_lm.models.mixers.mamba2 import Mamba2Mixer

MIXER_CLASSES: dict[str, type[nn.Module]] = {
    "efla": DeltaMixer,
    "gated_efla": DeltaMixer,
    "deltanet": DeltaMixer,
    "gated_deltanet": DeltaMixer,
    "mamba2": Mamba2Mixer,
    "attention": AttentionMixer,
}


def build_mixer(config: EflaConfig) -> nn.Module:
    """The mixer of one block; called as mixer(what its `maps` gave, SequenceInfo, LayerState or None)."""
    return MIXER_CLASSES[config.mixer](config)


__all__ = ["MIXER_CLASSES", "AttentionMixer", "DeltaMixer", "Mamba2Mixer", "build_mixer"]
