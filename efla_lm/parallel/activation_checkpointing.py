"""Activation checkpointing: what a block saves for its backward pass (`train.activation_checkpointing`).

    none        everything that the backward pass reads; in compiled blocks, what torch.compile considers fastest
    selective   the residual stream where a norm reads it, and the results of matmuls and of the mixer's op or the norm
                after it. Convolution, gates and casts of weights (and the activation of SwiGLU if PyTorch computes it)
                are recomputed, most of them inside the kernels of the backward pass
    products    the residual stream and the results of matmuls; the mixer's op is recomputed too
    full        the input of the block; everything else is recomputed

`scripts.plan.cost` counts the bytes. A block draws no random numbers, so no state of a generator is saved.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Forward = Callable[..., Tensor]  # (hidden, ...) -> hidden, see `EflaBlock`
KINDS = ("none", "selective", "products", "full")

aten = torch.ops.aten
MATMULS = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}

# Ops of efla_kernels, by the start of their names; its other ops are those of the mixers.
OUR_MATMULS = ("linear", "norm_linear", "swiglu_linear")
CHEAP = ("convolution",)


def checkpointing_kind(setting: str, compiled: bool) -> str:
    """The kind that `train.activation_checkpointing` means. `auto` is selective in compiled blocks, where it costs
    little time; in blocks that are not compiled every operation would call the policy in Python."""
    return ("selective" if compiled else "none") if setting == "auto" else setting


def _is_ours(op: Any) -> bool:
    return getattr(op, "namespace", "") == "efla_kernels"


def _policy(save: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


def selective_policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save the results of matmuls and of the mixers' ops, recompute the rest."""
    return _policy(op in MATMULS or (_is_ours(op) and not op.__name__.startswith(CHEAP)))


def matmuls_policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save the results of matmuls, recompute the rest."""
    return _policy(op in MATMULS or (_is_ours(op) and op.__name__.startswith(OUR_MATMULS)))


POLICIES = {"selective": selective_policy, "products": matmuls_policy}


def checkpointed(forward: Forward, kind: str) -> Forward:
    """`forward` with activation checkpointing of a `kind` in the table above. torch.compile makes it part of its graph.

    Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind in POLICIES:
        # torch warns that in-place operations would run twice: a block has none
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_about_context_fn)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, POLICIES[kind])

    @functools.wraps(forward)
    def wrapped(hidden: Tensor, *others: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(hidden, *others)
        return checkpoint(forward, hidden, *others, **options)

    return wrapped


def _is_not_about_context_fn(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
