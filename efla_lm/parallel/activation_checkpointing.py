"""What a block keeps from its forward pass for its backward pass (`train.activation_checkpointing`).

    none        all that the backward pass reads; compiled, what torch.compile thinks best for speed
    selective   the stream where a norm reads it, the results of matrix products and of the mixer's op, or of the norm
                behind it; convolution, gates and casts of weights (and SwiGLU's activation where PyTorch has it) are
                computed again, most of them inside the backward pass's own kernels
    products    the stream and the results of matrix products alone: the mixer's op is computed again too
    full        the block's input alone; the block is computed again, products included

`scripts.plan.cost` counts what that is. Nothing in a block draws random numbers, so no generator's state is kept.
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
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}

# of efla_kernels, whose other ops are the mixers'
OUR_PRODUCTS = ("linear", "norm_linear", "swiglu_linear")
CHEAP = ("convolution",)


def kind_of_checkpointing(setting: str, compiled: bool) -> str:
    """What `train.activation_checkpointing` means. `auto` is selective where blocks are compiled: there it costs little
    time, while outside of a compiled graph every operation would ask Python what to do."""
    return ("selective" if compiled else "none") if setting == "auto" else setting


def _is_ours(op: Any) -> bool:
    return getattr(op, "namespace", "") == "efla_kernels"


def _save(wanted: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE


def selective_policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save products and the mixers' ops, compute the rest again."""
    return _save(op in PRODUCTS or (_is_ours(op) and not op.__name__.startswith(CHEAP)))


def products_policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """Save products, compute the rest again."""
    return _save(op in PRODUCTS or (_is_ours(op) and op.__name__.startswith(OUR_PRODUCTS)))


POLICIES = {"selective": selective_policy, "products": products_policy}


def keeping(forward: Forward, kind: str) -> Forward:
    """`forward` with `kind` of the table above. Compiled afterwards, the choice is part of the compiled graph."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if kind == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind in POLICIES:
        # torch warns that operations in place would be computed twice: there are none in a block
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_not_about_context_fn)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, POLICIES[kind])

    @functools.wraps(forward)
    def kept(hidden: Tensor, *others: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(hidden, *others)
        return checkpoint(forward, hidden, *others, **options)

    return kept


def _is_not_about_context_fn(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
