"""Configuration of the model family: one class, one model per `mixer`."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import Any

from transformers import PretrainedConfig

from efla_lm.models.rules import RULES, Rule

# Keys that transformers writes into every config.json besides the fields that its base class declares.
_WRITTEN_BY_TRANSFORMERS = {
    "architectures", "attn_implementation", "auto_map", "dtype", "experts_implementation", "model_type", "name_or_path",
    "num_labels", "per_layer_config", "quantization_config", "torch_dtype", "transformers_version",
}  # fmt: skip


class EflaConfig(PretrainedConfig):
    """Shape of a language model with linear attention (or softmax attention, as the baseline).

    One block is RMSNorm, mixer, RMSNorm, SwiGLU; `mixer` chooses the rule, everything else is shared.

    Args:
        mixer: which model it is, a key of `efla_lm.models.rules.RULES`.
        vocab_size: rows of the embedding; must not be smaller than the tokenizer (see `check_vocabulary`).
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_heads, head_dim: heads of the delta rules and of attention (key width = value width = `head_dim`; it is
            hidden_size / num_heads unless given). Mamba-2 takes its heads from `expand` and `mamba_head_dim`.
        intermediate_size: width of the SwiGLU.
        mlp: whether blocks have a SwiGLU; by default all but Mamba-2's.
        conv_size: taps of the causal depthwise convolution before the recurrent mixers.
        output_gate: swish gate on the output norm of a delta mixer; by default on for the gated rules only.
        norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary embedding (attention only).
        expand, state_size, mamba_head_dim, num_groups: Mamba-2's inner width factor, state width, head width and
            number of B/C groups.
        tie_word_embeddings: whether the output head is the embedding.
        initializer_range: standard deviation of linear and embedding weights.
        backend: which implementation of the op runs: `auto`, `torch`, `reference`, `triton`,
            `triton_recompute` (chunk states are computed again in the backward pass, not kept) or `fla`.
        max_position_embeddings: context length of training; nothing in a recurrent model is limited by it.
        use_cache: whether a forward pass outside training returns a cache by default.

    Raises:
        ValueError: for sizes that do not fit together; TypeError for a key that does not exist.
    """

    model_type = "efla_lm"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012
    attribute_map = {"num_attention_heads": "num_heads"}  # noqa: RUF012

    def __init__(
        self,
        mixer: str = "efla",
        vocab_size: int = 32000,
        hidden_size: int = 1024,
        num_hidden_layers: int = 24,
        num_heads: int = 8,
        head_dim: int | None = None,
        intermediate_size: int = 2816,
        mlp: bool | None = None,
        conv_size: int = 4,
        output_gate: bool | None = None,
        norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        expand: int = 2,
        state_size: int = 128,
        mamba_head_dim: int = 64,
        num_groups: int = 1,
        tie_word_embeddings: bool = False,
        initializer_range: float = 0.02,
        backend: str = "auto",
        max_position_embeddings: int = 2048,
        use_cache: bool = True,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        pad_token_id: int | None = None,
        **base: Any,
    ) -> None:
        _refuse_unknown(base)
        if mixer not in RULES:
            raise ValueError(f"mixer must be one of {', '.join(RULES)}; got {mixer!r}")
        self.mixer = mixer
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_heads = num_heads
        self.head_dim = hidden_size // max(num_heads, 1) if head_dim is None else head_dim
        self.intermediate_size = intermediate_size
        self.mlp = self.rule.mlp if mlp is None else mlp
        self.conv_size = conv_size
        self.output_gate = self.rule.gated if output_gate is None else output_gate
        self.norm_eps = norm_eps
        self.rope_theta = rope_theta
        self.expand = expand
        self.state_size = state_size
        self.mamba_head_dim = mamba_head_dim
        self.num_groups = num_groups
        self.initializer_range = initializer_range
        self.backend = backend
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self._check(head_dim_given=head_dim is not None)
        base |= {"bos_token_id": bos_token_id, "eos_token_id": eos_token_id, "pad_token_id": pad_token_id}
        base["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**base)

    def _check(self, head_dim_given: bool) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "conv_size", "expand",
                     "state_size", "mamba_head_dim", "num_groups", "max_position_embeddings"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name, lowest in (("norm_eps", 0.0), ("rope_theta", 1.0), ("initializer_range", 0.0)):
            if not lowest <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a finite number from {lowest:g} up, got {getattr(self, name)!r}")
        if self.mlp and self.intermediate_size < 1:
            raise ValueError(f"intermediate_size must be positive in blocks with an MLP, got {self.intermediate_size}")
        if self.mixer == "mamba2":
            if self.inner_size % self.mamba_head_dim:
                raise ValueError(
                    f"expand * hidden_size = {self.inner_size} must be a multiple of mamba_head_dim = "
                    f"{self.mamba_head_dim}"
                )
            if self.mamba_heads % self.num_groups:
                raise ValueError(f"{self.mamba_heads} heads cannot be shared by num_groups = {self.num_groups}")
        elif not head_dim_given and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is no multiple of num_heads = {self.num_heads}; set head_dim"
            )
        if self.mixer == "attention" and self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")
        if self.output_gate and not self.rule.delta:
            names = ", ".join(name for name, rule in RULES.items() if rule.delta)
            raise ValueError(f"output_gate belongs to {names}; the mixer is {self.mixer}")

    @property
    def rule(self) -> Rule:
        """The model's row of the table."""
        return RULES[self.mixer]

    @property
    def key_size(self) -> int:
        """Width of all keys (and of all values) together: num_heads * head_dim."""
        return self.num_heads * self.head_dim

    @property
    def inner_size(self) -> int:
        """Inner width of a Mamba-2 mixer: expand * hidden_size."""
        return self.expand * self.hidden_size

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba-2 mixer."""
        return self.inner_size // self.mamba_head_dim


def check_vocabulary(tokenizer_size: int, config: EflaConfig) -> None:
    """Refuse a tokenizer with more tokens than the model has embeddings, before a device-side assert does.

    Raises:
        UserError: naming both sizes.
    """
    if tokenizer_size > config.vocab_size:
        from efla_lm.errors import UserError

        raise UserError(
            f"the tokenizer has {tokenizer_size} tokens but the model has vocab_size = {config.vocab_size}; "
            f"set model.vocab_size to at least {tokenizer_size} or use the tokenizer that the model was made for"
        )


@functools.cache
def _base_keys() -> frozenset[str]:
    """Keys that transformers' base class takes or writes, in the version installed."""
    taken = set(inspect.signature(PretrainedConfig.__init__).parameters)
    return frozenset(taken | set(PretrainedConfig().to_dict()) | _WRITTEN_BY_TRANSFORMERS)


def _refuse_unknown(base: dict[str, Any]) -> None:
    """TypeError for a key that neither we nor transformers know: its base class would keep a typo in silence."""
    for key in base:
        if key in _base_keys() or key.startswith("_"):
            continue
        ours = [name for name in inspect.signature(EflaConfig.__init__).parameters if name not in ("self", "base")]
        near = difflib.get_close_matches(key, ours, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known keys are {', '.join(ours)}"
        raise TypeError(f"EflaConfig has no key {key!r}{hint}")
