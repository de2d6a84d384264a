"""Rotary position embedding (RoPE), half-rotation form."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, fp32 [..., T, 1, head_dim / 2] for positions [..., T].

    Angle i of position p is p * theta^(-2i / head_dim). Computed on the fly: no buffer that a model built on the meta
    device could lose.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * theta**-exponents
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i + K/2}) of x [B, T, H, K] by the angles of `rotary_tables`."""
    cos, sin = tables
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
