"""The table of models: one row for each value of `config.mixer`. Everything that differs by name is read from here.

A new model is a row here, a file with its mixer and an option in conf/model (docs/add_a_mixer.md). The table imports
nothing, so that settings, scripts and reports may import it freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

DELTA_MIXER = "efla_lm.models.mixers.delta:DeltaMixer"


class Twin(NamedTuple):
    """The same model in another library: its `model_type`, and the stem of its classes (`DeltaNet`ForCausalLM)."""

    model_type: str
    stem: str


@dataclass(frozen=True)
class Rule:
    """One model of the family.

    Attributes:
        label, colour: how tables and plots show it.
        mixer: its class as `module:Class`, imported when a model is built.
        op: the function of `efla_kernels` that its backend must serve; None: torch's scaled dot-product attention.
        option: its name in conf/model.
        gated: its state decays by a learned gate; unless the config says otherwise its output norm has a swish gate.
        unit_keys: the op normalises keys to length 1 (queries always).
        value_power: p for an op that gets values v |k|^p, which makes it another model (`efla_kernels.scaled_values`).
        mlp: its blocks hold a SwiGLU unless the config says otherwise.
        euler: for an exact solution, the row that takes an explicit Euler step of the same equation.
        fla, transformers: its twin in flash-linear-attention and in transformers.
    """

    label: str
    colour: str
    mixer: str
    op: str | None
    option: str
    gated: bool = False
    unit_keys: bool = False
    value_power: int = 0
    mlp: bool = True
    euler: str | None = None
    fla: Twin | None = None
    transformers: Twin | None = None

    @property
    def delta(self) -> bool:
        """Whether `DeltaMixer` computes it: the paper's four delta rules, and the factorial between two of them."""
        return self.mixer == DELTA_MIXER

    def mixer_class(self) -> Any:
        """The class that `mixer` names."""
        module, name = self.mixer.split(":")
        return getattr(import_module(module), name)


RULES: dict[str, Rule] = {
    "efla": Rule("EFLA", "#c0392b", DELTA_MIXER, op="efla", option="efla", euler="deltanet"),
    "gated_efla": Rule(
        "Gated EFLA", "#e59866", DELTA_MIXER, op="gated_efla", option="gated_efla", gated=True, euler="gated_deltanet"
    ),
    "deltanet": Rule(
        "DeltaNet", "#2471a3", DELTA_MIXER, op="deltanet", option="deltanet", unit_keys=True,
        fla=Twin("delta_net", "DeltaNet"),
    ),
    "gated_deltanet": Rule(
        "Gated DeltaNet", "#85c1e9", DELTA_MIXER, op="gated_deltanet", option="gated_deltanet", gated=True,
        unit_keys=True, fla=Twin("gated_deltanet", "GatedDeltaNet"),
    ),
    # The factorial between DeltaNet and EFLA, which differ in the gate and in the values' scale.
    "efla_gate": Rule(
        "DeltaNet with EFLA's gate", "#8e44ad", DELTA_MIXER, op="efla", option="efla_gate", value_power=1
    ),
    "efla_value": Rule(
        "DeltaNet with EFLA's values", "#16a085", DELTA_MIXER, op="deltanet", option="efla_value", unit_keys=True,
        value_power=-1,
    ),
    "mamba2": Rule(
        "Mamba-2", "#7d8a2e", "efla_lm.models.mixers.mamba2:Mamba2Mixer", op="mamba2", option="mamba2", mlp=False,
        fla=Twin("mamba2", "Mamba2"), transformers=Twin("mamba2", "Mamba2"),
    ),
    "attention": Rule(
        "Transformer", "#555555", "efla_lm.models.mixers.attention:AttentionMixer", op=None, option="transformer",
        fla=Twin("transformer", "Transformer"),
    ),
}  # fmt: skip
