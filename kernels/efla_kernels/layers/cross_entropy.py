"""Cross-entropy of a linear: on a GPU without all tokens' logits in memory, elsewhere by PyTorch's own operations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100
FEWEST_ROWS = 2048  # enough for matmuls that keep a GPU busy; 0.25 GiB of logits at a vocabulary of 32000
MOST_ROWS = 4096  # 8192 are not faster; 16384 are, by 2 %, and take 2 GiB
MOST_LOGITS = 2**28  # in fp32 1 GiB


def logit_rows(tokens: int, vocabulary: int) -> int:
    """Rows of fp32 logits that the fused loss holds at once: 4096, or 2048 where 4096 would raise the peak of memory.

    With more rows the matmuls are larger and the head's gradient is read and written less often: 4096 rows take 5 %
    less time than 2048. They are taken where they are at most an eighth of the tokens and at most 1 GiB. The loss then
    takes 4 V / 8 bytes per token, less than a block's backward pass (`scripts.plan.cost`).
    """
    affordable = min(tokens // 8, MOST_LOGITS // vocabulary) >= MOST_ROWS
    return min(tokens, MOST_ROWS if affordable else FEWEST_ROWS)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """sum over rows of -log softmax(hidden weight^T)[target], an fp32 scalar (fp64 for fp64 inputs).

    hidden [N, D] and weight [V, D] of one floating type; targets [N] int64, -100 ignored. On a GPU targets are not
    checked against V (that would make the host wait). Raises ValueError for shapes that do not fit.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"expected hidden [N, D] and weight [V, D], got {list(hidden.shape)} and {list(weight.shape)}")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets: expected [{hidden.shape[0]}], one for each row of hidden, got {list(targets.shape)}"
        )
    if hidden.is_cuda:
        # Triton is installed wherever CUDA is
        from efla_kernels.layers.cross_entropy_kernels import fused_linear_cross_entropy

        return fused_linear_cross_entropy(hidden, weight, targets, logit_rows(hidden.shape[0], weight.shape[0]))
    logits = F.linear(hidden, weight)
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
