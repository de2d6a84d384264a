"""Updates of AdamW by the kernel and, in float64, by torch."""

from __future__ import annotations

import torch
from efla_kernels.triton.adamw import BLOCK, adamw
from torch import Tensor

SHAPES = [(3, 5), (2, BLOCK), (BLOCK,), (1,), (0,), (7, 1024), (BLOCK + 1,), (4,)]
RATES, DIVISORS, SKIPPED = (1e-3, 3e-2, 1e-4, 1e-2), (1.0, 2.5, 1.0, 40.0), (False, False, True, False)


def tensors(shift: int, device: str, seed: int) -> list[Tensor]:
    """One of each shape, `shift` numbers behind a multiple of 16 bytes."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(shape, generator=generator) for shape in SHAPES)
    return [torch.cat([torch.zeros(shift), x.flatten()]).to(device)[shift:].view(x.shape) for x in numbers]


def run(shift: int, betas: tuple[float, float], device: str) -> list[list[Tensor]]:
    """p, m, v and n after four updates, one of them declined for a NaN."""
    parameters = tensors(shift, device, 0)
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    steps = [torch.zeros((), device=device) for _ in parameters]
    for number, (lr, divisor, skip) in enumerate(zip(RATES, DIVISORS, SKIPPED, strict=True)):
        gradients = tensors(shift, device, 1 + number)
        if skip:
            gradients[1][0, 0] = torch.nan
        adamw(
            parameters, gradients, means, squares, steps, lr=lr, betas=betas, eps=1e-8, weight_decay=0.1,
            divisor=torch.tensor(divisor, device=device), skip=torch.tensor(skip, device=device),
        )  # fmt: skip
    return [parameters, means, squares, steps]


def truth(betas: tuple[float, float]) -> list[list[Tensor]]:
    """The same by torch in float64, without the declined update."""
    parameters = [p.double().requires_grad_() for p in tensors(0, "cpu", 0)]
    optimizer = torch.optim.AdamW(parameters, betas=betas, eps=1e-8, weight_decay=0.1, foreach=False)
    for number, (lr, divisor, skip) in enumerate(zip(RATES, DIVISORS, SKIPPED, strict=True)):
        for p, gradient in zip(parameters, tensors(0, "cpu", 1 + number), strict=True):
            p.grad = gradient.double() / divisor
        optimizer.param_groups[0]["lr"] = lr
        if not skip:
            optimizer.step()
    states = [optimizer.state[p] for p in parameters]
    moments = [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")]
    return [[p.detach() for p in parameters], *moments]


def check(shift: int, betas: tuple[float, float], device: str) -> None:
    for got, expected in zip(run(shift, betas, device), truth(betas), strict=True):
        for x, exact in zip(got, expected, strict=True):
            assert x.shape == exact.shape and (x.cpu() - exact).norm() <= 3e-7 * exact.norm()
