"""Our models under the names of other libraries, and back: tensors and configuration, nothing computed.

transformers    Mamba-2 (`Mamba2ForCausalLM`): other names, and the convolution's weight is [D, 1, W]
fla             Mamba-2 as transformers has it; DeltaNet and Gated DeltaNet, where q, k, v and gate, up are matrices
                (and convolutions) of their own

flash-linear-attention and transformers both say `mamba2`: a configuration with `norm_eps` is fla's. EFLA and Gated EFLA
have no counterpart there. fp32 or bf16 residuals (`residual_in_fp32`) are no part of the weights and not converted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from efla_lm.errors import UserError
from efla_lm.models.config import EflaConfig
from efla_lm.models.rules import RULES, Twin

LAYOUTS = ("transformers", "fla")
TWINS: dict[tuple[str, str], Twin] = {
    (layout, name): twin
    for layout in LAYOUTS
    for name, rule in RULES.items()
    if (twin := getattr(rule, layout)) is not None and (rule.delta or name == "mamba2")
}
State = dict[str, Tensor]

# (ours, theirs) as they stand in a name; the first that fits is replaced
_MAMBA2_NAMES = (
    ("model.layers.*.mixer_norm.", "backbone.layers.*.norm."),
    ("model.layers.*.mixer.conv.", "backbone.layers.*.mixer.conv1d."),
    ("model.layers.*.mixer.", "backbone.layers.*.mixer."),
    ("model.embeddings.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("lm_head.", "lm_head."),
)
_DELTA_NAMES = (
    ("model.layers.*.mixer_norm.", "model.layers.*.attn_norm."),
    ("model.layers.*.mixer.decay.", "model.layers.*.attn."),
    ("model.layers.*.mixer.", "model.layers.*.attn."),
    ("model.layers.*.mlp", "model.layers.*.mlp"),
    ("model.embeddings.", "model.embeddings."),
    ("model.norm.", "model.norm."),
    ("lm_head.", "lm_head."),
)
# one matrix here, several there
_JOINED = {
    "mixer.qkv_proj.weight": [f"attn.{x}_proj.weight" for x in "qkv"],
    "mixer.qkv_conv.weight": [f"attn.{x}_conv1d.weight" for x in "qkv"],
    "mlp.gate_up_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
}
_IN_DECAY = ("A_log", "dt_bias")


def to_layout(layout: str, config: EflaConfig, state: Mapping[str, Tensor]) -> tuple[dict[str, Any], State]:
    """(config.json, tensors) of our model as `layout` has them. A tied head is left out.

    Raises:
        UserError: the layout has no such model.
    """
    if (layout, config.mixer) not in TWINS:
        known = ", ".join(f"{mixer} to {name}" for name, mixer in TWINS)
        raise UserError(f"{layout} has no counterpart of {config.mixer}: expected {known}")
    model_type, stem = TWINS[layout, config.mixer]
    written = {"model_type": model_type, "architectures": [f"{stem}ForCausalLM"], **_common(config)}
    kept = {n: x for n, x in state.items() if not (config.tie_word_embeddings and n == "lm_head.weight")}
    if config.mixer == "mamba2":
        written |= _mamba2_config(layout, config)
        renamed = {_renamed(n, _MAMBA2_NAMES, back=False): x for n, x in kept.items()}
        return written, {n: x[:, None] if n.endswith("conv1d.weight") else x for n, x in renamed.items()}
    return written | _delta_config(config), _split(kept)


def from_layout(given: Mapping[str, Any], state: Mapping[str, Tensor]) -> tuple[EflaConfig, State]:
    """Our configuration and tensors from another library's config.json and tensors.

    Raises:
        UserError: another kind of model, or one with parts that ours does not have.
    """
    model_type = given.get("model_type")
    mixers = {twin.model_type: name for (_, name), twin in TWINS.items()}
    if model_type not in mixers:
        raise UserError(f"model_type: expected one of {', '.join(mixers)}, got {model_type!r}")
    mixer = mixers[model_type]
    config = _read_delta(mixer, given) if RULES[mixer].delta else _read_mamba2(given)
    if config.mixer == "mamba2":
        renamed = {_renamed(n, _MAMBA2_NAMES, back=True): x for n, x in state.items()}
        renamed = {n: x.squeeze(1) if n.endswith("mixer.conv.weight") else x for n, x in renamed.items()}
    else:
        renamed = _joined(state)
    if config.tie_word_embeddings:
        renamed.setdefault("lm_head.weight", renamed["model.embeddings.weight"])
    return config, renamed


def _renamed(name: str, table: tuple[tuple[str, str], ...], back: bool) -> str:
    for ours, theirs in table:
        source, target = (theirs, ours) if back else (ours, theirs)
        pattern = re.escape(source).replace(r"\*", r"(\d+)")
        if found := re.match(pattern, name):
            return target.replace("*", found[1] if found.groups() else "") + name[found.end() :]
    raise UserError(f"tensor {name} has no place in the other layout")


def _split(state: Mapping[str, Tensor]) -> State:
    """A DeltaNet's tensors under fla's names."""
    result: State = {}
    for name, x in state.items():
        block = re.match(r"model\.layers\.\d+\.", name)
        parts = _JOINED.get(name[block.end() :]) if block else None
        if block is None or parts is None:
            result[_renamed(name, _DELTA_NAMES, back=False)] = x
            continue
        for part, piece in zip(parts, x.chunk(len(parts)), strict=True):
            result[block[0] + part] = (piece[:, None] if "conv1d" in part else piece).contiguous()
    return result


def _joined(state: Mapping[str, Tensor]) -> State:
    """The inverse of `_split`."""
    result: State = {}
    owner = {part: ours for ours, parts in _JOINED.items() for part in parts}
    for name, x in state.items():
        block = re.match(r"model\.layers\.\d+\.", name)
        rest = name[block.end() :] if block else name
        if block is None or rest not in owner:
            new = _renamed(name, _DELTA_NAMES, back=True)
            if name.rsplit(".", 1)[-1] not in _IN_DECAY:
                new = new.replace(".mixer.decay.", ".mixer.")
            result[new] = x
            continue
        parts = [block[0] + part for part in _JOINED[owner[rest]]]
        if missing := [part for part in parts if part not in state]:
            raise UserError(f"tensor {missing[0]} is missing")
        if name == parts[0]:
            pieces = [state[part].squeeze(1) if "conv1d" in part else state[part] for part in parts]
            result[block[0] + owner[rest]] = torch.cat(pieces)
    return result


def _common(config: EflaConfig) -> dict[str, Any]:
    """Keys that the configurations share."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings", "initializer_range", "use_cache",
             "bos_token_id", "eos_token_id", "pad_token_id")  # fmt: skip
    return {name: getattr(config, name) for name in names} | {"dtype": "float32"}


def _mamba2_config(layout: str, config: EflaConfig) -> dict[str, Any]:
    eps, limit = ("layer_norm_epsilon", "time_step_limit") if layout == "transformers" else ("norm_eps", "dt_limit")
    written = {
        "state_size": config.state_size, "expand": config.expand, "head_dim": config.mamba_head_dim,
        "n_groups": config.num_groups, "conv_kernel": config.conv_size, "use_bias": False, "use_conv_bias": True,
        "hidden_act": "silu", "residual_in_fp32": False, eps: config.norm_eps, limit: [0.0, float("inf")],
    }  # fmt: skip
    if layout == "transformers":
        return written | {"num_heads": config.mamba_heads}
    return written | {"rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False}


def _delta_config(config: EflaConfig) -> dict[str, Any]:
    written = {
        "num_heads": config.num_heads, "conv_size": config.conv_size, "use_gate": config.output_gate,
        "intermediate_size": config.intermediate_size, "norm_eps": config.norm_eps, "use_short_conv": True,
        "allow_neg_eigval": False, "hidden_act": "swish", "attn": None,
        "max_position_embeddings": config.max_position_embeddings,
    }  # fmt: skip
    if config.rule.gated:
        return written | {"head_dim": config.head_dim, "expand_v": 1.0}
    ratio = config.key_size / config.hidden_size
    return written | {
        "expand_k": ratio, "expand_v": ratio, "use_beta": True, "use_output_norm": True, "qk_norm": "l2",
        "qk_activation": "silu",
    }  # fmt: skip


def _expect(given: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Refuse what our models do not have; the first allowed value is what a missing key means."""
    for name, values in allowed.items():
        if given.get(name, values[0]) not in values:
            raise UserError(f"{name}={given[name]!r}: our model has only {name}={values[0]!r}")


def _shared(given: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Our fields from the keys `names` (ours=theirs) and from those that are called the same."""
    fields = {}
    for ours, theirs in {**{n: n for n in ("vocab_size", "hidden_size", "num_hidden_layers")}, **names}.items():
        if theirs not in given:
            raise UserError(f"config.json has no key {theirs}")
        fields[ours] = given[theirs]
    for name in ("tie_word_embeddings", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"):
        if name in given:
            fields[name] = given[name]
    return fields


def _read_mamba2(given: Mapping[str, Any]) -> EflaConfig:
    eps = "norm_eps" if "norm_eps" in given else "layer_norm_epsilon"
    _expect(given, use_bias=(False,), use_conv_bias=(True,), hidden_act=("silu", "swish"), rmsnorm=(True,),
            norm_before_gate=(False,), D_has_hdim=(False,))  # fmt: skip
    limit = given.get("dt_limit" if eps == "norm_eps" else "time_step_limit") or (0.0, float("inf"))
    # transformers writes an infinite number as {"__float__": "Infinity"}
    low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limit)
    if low > 0 or high != float("inf"):
        raise UserError(f"a limit of the step sizes, {low:g} to {high:g}: our model has none")
    fields = _shared(
        given, state_size="state_size", expand="expand", mamba_head_dim="head_dim", num_groups="n_groups",
        conv_size="conv_kernel", norm_eps=eps,
    )  # fmt: skip
    return EflaConfig(mixer="mamba2", **fields)


def _read_delta(mixer: str, given: Mapping[str, Any]) -> EflaConfig:
    gated = RULES[mixer].gated
    _expect(given, use_short_conv=(True,), allow_neg_eigval=(False,), hidden_act=("swish",), attn=(None,),
            conv_bias=(False,), attnres_block_size=(None,))  # fmt: skip
    fields = _shared(given, num_heads="num_heads", conv_size="conv_size", norm_eps="norm_eps")
    if gated:
        _expect(
            given, expand_v=(1.0,), num_v_heads=(None, fields["num_heads"]), output_gate_activation=("swish", "silu")
        )
        fields |= _shared(given, head_dim="head_dim")
    else:
        ratio = given.get("expand_k", 1.0)
        _expect(given, expand_v=(ratio,), use_beta=(True,), use_output_norm=(True,), qk_norm=("l2",),
                qk_activation=("silu",))  # fmt: skip
        fields["head_dim"] = round(ratio * fields["hidden_size"]) // fields["num_heads"]
    width = given.get("intermediate_size")
    if width is None:  # fla's own rule: 2/3 of hidden_ratio, rounded up to a multiple of 256
        width = -(-int(fields["hidden_size"] * (given.get("hidden_ratio") or 4) * 2 / 3) // 256) * 256
    if "max_position_embeddings" in given:
        fields["max_position_embeddings"] = given["max_position_embeddings"]
    return EflaConfig(
        mixer=mixer, intermediate_size=width, output_gate=given.get("use_gate", gated), **fields,
    )  # fmt: skip
