"""AdamW over sharded fp32 masters: which parameters decay, the gradient norm of all ranks, a step that may be skipped.

    m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2                                   (arXiv 1711.05101)
    p <- p - lr (m' / (sqrt(v') + eps) + weight_decay p),   m' = m / (1 - b1^n),   v' = v / (1 - b2^n)

The paper gives AdamW with weight decay 0.1 and does not list what decays. We follow GPT-2/3, Llama and Mamba: the
weights of `nn.Linear` and `nn.Embedding` decay, tied or not; norm gains, biases, short convolutions, A_log, dt_bias and
D do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from efla_lm.parallel.distributed import is_whole, local


def decayed(model: nn.Module) -> set[str]:
    """Names of the parameters with weight decay: matrices of linear layers and embeddings."""
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding))
    } & {name for name, _ in model.named_parameters()}


def build_optimizer(model: nn.Module, *, betas: Sequence[float], eps: float, weight_decay: float) -> AdamW:
    """AdamW whose state exists at once (zeros), so that a checkpoint can be read straight into it.

    The learning rate is 0 until `set_learning_rate`. Parameters must be fp32 (ValueError otherwise): an optimiser on
    bf16 weights loses every change smaller than 1/256 of the weight.
    """
    decay, names = decayed(model), dict(model.named_parameters())
    wrong = [name for name, p in names.items() if p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"optimiser masters must be float32: {len(wrong)} are not, the first is {wrong[0]}")
    # one fused call takes either sharded (DTensor) or whole (plain) parameters
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in names.items():
        groups.setdefault((name in decay, is_whole(name)), []).append(parameter)
    optimizer = AdamW(
        [{"params": group, "weight_decay": weight_decay if key[0] else 0.0} for key, group in groups.items()],
        lr=0.0,
        betas=(betas[0], betas[1]),
        eps=eps,
        fused=True,  # one kernel, and the only form that reads on the device whether to skip (`found_inf`)
    )
    for parameter in names.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    return optimizer


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def squared_norm(model: nn.Module, *, replicas: int, world_size: int) -> Tensor:
    """This rank's share of the squared gradient norm, a float64 scalar on the device. The sum over ranks is |g|^2.

    replicas: how many ranks hold the same shard (the size of the mesh dimension `replicate`). All `world_size` ranks
    hold the whole parameters.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    for whole, copies in ((False, replicas), (True, world_size)):
        all_grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        grads = [local(grad) for name, grad in all_grads if is_whole(name) is whole]
        if grads:
            total += torch.stack(torch._foreach_norm(grads)).double().square().sum() / copies
    return total


def step_unless(optimizer: AdamW, skip: Tensor, norm: Tensor, max_norm: float) -> None:
    """One AdamW step on gradients scaled by min(1, max_norm / norm), or none if `skip` (bool scalar on the device) is
    true: weights, moments and the number of steps then keep their bits. The host does not wait for the device.

    norm: gradient norm of all ranks, a scalar on the device. max_norm: 0 for no clipping. The gradients are freed.
    """
    # torch's GradScaler sets these two: the fused kernel divides by the first, and does nothing if the second is 1
    optimizer.grad_scale = (norm / max_norm).clamp(min=1.0).float() if max_norm > 0 else None  # type: ignore[attr-defined]
    optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
