"""The language model: embedding, blocks of RMSNorm - mixer - RMSNorm - SwiGLU, norm, head.

Dtypes: all parameters of a model have one dtype, so that FSDP2 can group them: fp32 for training, where sharding casts
to bf16 for compute, or that of `from_pretrained(dtype=...)`. Activations have the same dtype, or `EflaModel.compute` if
set: weights are then cast where they are used. Always fp32 are recurrent states, beta, |k|^2 and their coefficients,
decays (from A_log and dt_bias), Mamba-2's steps, statistics of norms, rotary angles, and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import efla_kernels
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput, logging

from efla_lm.models.cache import LayerState, RecurrentCache
from efla_lm.models.config import EflaConfig
from efla_lm.models.generation import RecurrentGeneration
from efla_lm.models.init import initial_value
from efla_lm.models.layers import SwiGLU
from efla_lm.models.norm_linear import Linear, RMSNorm, add_branch
from efla_lm.models.sequence import SequenceInfo, check_positions, describe, is_left_padded

logger = logging.get_logger(__name__)


class EflaBlock(GradientCheckpointingLayer):
    """h = h + mixer(norm(h)), then h = h + mlp(norm(h)) where the config has an MLP."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps, config.backend)
        self.mixer = config.rule.mixer_class()(config)
        self.mlp: SwiGLU | None = None
        if config.mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, config.backend)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.backend)

    def forward(self, hidden: Tensor, info: SequenceInfo, layer: LayerState | None = None) -> Tensor:
        """[B, T, hidden_size] -> the same; reads and replaces the states of `layer` if there is one."""
        fuse = layer is None
        hidden = add_branch(hidden, self.mixer_norm, self.mixer, info, layer, fuse=fuse)
        return hidden if self.mlp is None else add_branch(hidden, self.mlp_norm, self.mlp, fuse=fuse)


@dataclass
class EflaOutput(ModelOutput):
    """What a forward pass returns; absent parts are None.

    Attributes:
        loss: fp32 scalar; mean for `labels`, sum for `targets`.
        logits: [B, T or logits_to_keep, vocab_size].
        last_hidden_state: [B, T, hidden_size] after the final norm (base model only).
        cache: `RecurrentCache` for the next call with further tokens; `past_key_values` is another name for it.
        hidden_states: the embedding and the output of each block, with output_hidden_states=True.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    cache: RecurrentCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None

    @property
    def past_key_values(self) -> RecurrentCache | None:
        return self.cache


class EflaPreTrainedModel(PreTrainedModel):
    """What transformers reads from the base model and the language model alike."""

    config_class = EflaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EflaBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True
    _is_stateful = True  # no assisted decoding: the state cannot be rolled back
    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            # transformers marks the parameters that it loaded from a checkpoint
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.copy_(initial_value(module, name, parameter.shape, self.config.initializer_range))

    def _returns_dict(self, return_dict: bool | None) -> bool:
        return bool(self.config.return_dict) if return_dict is None else return_dict

    def new_cache(self) -> RecurrentCache:
        """An empty cache for this model."""
        return RecurrentCache(self.config.num_hidden_layers)


class EflaModel(EflaPreTrainedModel):
    """Token ids (or embeddings) to final hidden states."""

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(EflaBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.gradient_checkpointing = False
        self.compute: torch.dtype | None = None  # of activations, where fp32 weights are not sharded; None: theirs
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings = cast(nn.Embedding, value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        cache: RecurrentCache | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> EflaOutput | tuple[Tensor, ...]:
        """Run the blocks; see `EflaForCausalLM.forward` for the arguments."""
        if output_attentions:
            raise ValueError("output_attentions=True: these models compute no attention weights; leave it out")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        hidden = hidden if self.compute is None else hidden.to(self.compute)
        cache = self._given_cache(cache, past_key_values)
        batch, length = hidden.shape[:2]
        info = describe(batch, length, hidden.device, attention_mask, cu_seqlens, cache)
        if position_ids is not None:
            check_positions(position_ids, info)
        cache = self._resolve_cache(cache, use_cache, info)
        if self.config.rule.op is None:
            info = info.for_attention(self.config.head_dim, self.config.rope_theta)
        collect = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        collected = [hidden] if collect else None
        for index, block in enumerate(self.layers):
            hidden = block(hidden, info, None if cache is None else cache.layers[index])
            if collected is not None:
                collected.append(hidden)
        if cache is not None:
            cache.advance(length, info.mask)
        output = EflaOutput(
            last_hidden_state=self.norm(hidden),
            cache=cache,
            hidden_states=None if collected is None else tuple(collected),
        )
        return output if self._returns_dict(return_dict) else output.to_tuple()

    def _given_cache(self, cache: object, past_key_values: object) -> RecurrentCache | None:
        """The cache, given under either name."""
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError("cache and past_key_values are two names of one argument; got two different caches")
        given = past_key_values if cache is None else cache
        if given is not None and not isinstance(given, RecurrentCache):
            raise ValueError(f"expected a RecurrentCache (model.new_cache()), got {type(given).__name__}")
        if given is not None and len(given.layers) != len(self.layers):
            raise ValueError(f"the cache is for {len(given.layers)} layers, the model has {len(self.layers)}")
        return given

    def _resolve_cache(
        self, cache: RecurrentCache | None, use_cache: bool | None, info: SequenceInfo
    ) -> RecurrentCache | None:
        """The cache that this pass fills, if any; use_cache=None: one outside training, if the input allows it."""
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # A recomputed block would update its state twice
            if cache is not None:
                raise ValueError("gradient checkpointing recomputes blocks: training cannot continue from a cache")
            if use_cache:
                logger.warning_once("gradient checkpointing recomputes blocks: no cache is made in training")
            return None
        if cache is not None and use_cache is not False:
            if not is_left_padded(info):
                raise ValueError("a cache allows padding on the left only; the attention_mask ends with padding")
            return cache
        if use_cache is False and cache is not None:
            raise ValueError("got a cache together with use_cache=False; leave one of them out")
        possible = info.cu_seqlens is None and is_left_padded(info)
        if use_cache and not possible:
            raise ValueError(
                "use_cache=True needs rows that more tokens can follow: padding on the left only, no cu_seqlens; "
                "pass use_cache=False to score right-padded or packed batches"
            )
        default = self.config.use_cache and not self.training and possible
        return self.new_cache() if (default if use_cache is None else use_cache) else None


class EflaForCausalLM(EflaPreTrainedModel, RecurrentGeneration, GenerationMixin):
    """Language model with an output head, tied to the embedding or not."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: EflaConfig) -> None:
        super().__init__(config)
        self.model = EflaModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embeddings = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        cache: RecurrentCache | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> EflaOutput | tuple[Tensor, ...]:
        """Logits, loss and cache of a batch.

        Args:
            input_ids, inputs_embeds: exactly one of [B, T] and [B, T, hidden_size].
            attention_mask: 1 on tokens, 0 on padding, [B, T] or with the cached positions in front. Padding on the left
                changes nothing; on the right it is allowed without a cache.
            cache, past_key_values: two names for the `RecurrentCache` of the tokens before.
            labels: [B, T] as in transformers: equal to input_ids, shifted here, -100 ignored; mean loss.
            shift_labels: [B, T] labels that are shifted already, in place of `labels`.
            num_items_in_batch: divisor of the loss in place of the number of counted labels, for gradient accumulation.
            targets: [B, T] the next token of each position, -100 ignored; the loss is the SUM over the others, and no
                logits are returned.
            cu_seqlens: [N+1] offsets of N documents packed into one row (B = 1): no state, convolution or attention
                crosses them.
            use_cache: return a cache; None: outside training when config.use_cache and no loss is asked for.
            logits_to_keep: only the last n positions get logits (0: all), or the positions of an index tensor.
            position_ids: [B, T], which must rise by one along tokens: only distances enter the model.
            output_hidden_states, return_dict: as in transformers; None: as the config says.
            output_attentions: must not be True.

        Raises:
            ValueError: for masks, boundaries, caches, positions or targets that do not fit.
        """
        mean = labels is not None or shift_labels is not None
        if mean and targets is not None:
            raise ValueError("give labels (shifted here, mean) or targets (aligned, sum), not both")
        if use_cache is None and cache is None and past_key_values is None and (mean or targets is not None):
            use_cache = False
        output = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            cache=cache,
            cu_seqlens=cu_seqlens,
            use_cache=use_cache,
            position_ids=position_ids,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        hidden = output.last_hidden_state
        loss, logits = None, None
        if targets is not None:
            loss = self._summed_loss(hidden, targets)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden if mean else hidden[:, kept])
            if shift_labels is not None:
                loss = _mean_loss(logits, shift_labels, num_items_in_batch)
            elif labels is not None:
                _check_labels(labels, logits)
                loss = _mean_loss(logits[:, :-1], labels[:, 1:], num_items_in_batch)
        result = EflaOutput(loss=loss, logits=logits, cache=output.cache, hidden_states=output.hidden_states)
        return result if self._returns_dict(return_dict) else result.to_tuple()

    def _summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if targets.shape != hidden.shape[:2]:
            raise ValueError(f"targets must be {tuple(hidden.shape[:2])} as the tokens, got {tuple(targets.shape)}")
        weight = self.lm_head.weight.to(hidden.dtype)
        return efla_kernels.linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten())


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    if labels.shape != logits.shape[:2]:
        raise ValueError(f"labels must be {tuple(logits.shape[:2])} as the tokens, got {tuple(labels.shape)}")


def _mean_loss(logits: Tensor, labels: Tensor, items: Tensor | int | None) -> Tensor:
    """Sum of -log p(labels[t] | tokens to t) over labels that are not -100, over `items` or their count; 0 without."""
    _check_labels(labels, logits)
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    if items is None:
        return total / (labels != -100).sum().clamp(min=1)
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)
