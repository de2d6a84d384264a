"""Backend "fla": flash-linear-attention's chunked Triton kernels for DeltaNet, EFLA and Gated DeltaNet on a GPU.

EFLA is fla's delta rule with raw keys and beta := a. Gated EFLA has erase != write, which fla's kernels cannot express
(scaling v by write / erase diverges as g -> 0): neither it nor Mamba-2 is offered.
The first call imports fla, which is slow.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from efla_kernels import model_coefficients, register_backend
from torch import Tensor


class FlaBackend:
    """The three ops with the signatures of efla_kernels; inputs 16-bit on CUDA, state fp32 [N, H, K, V]."""

    def deltanet(self, q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """See `efla_kernels.deltanet`."""
        return self._delta_rule("deltanet", q, k, v, beta_logit, options)

    def efla(self, q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """See `efla_kernels.efla`."""
        return self._delta_rule("efla", q, k, v, beta_logit, options)

    def gated_deltanet(
        self, q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, log_g: Tensor, **options: Any
    ) -> tuple[Tensor, Any]:
        """See `efla_kernels.gated_deltanet`."""
        kernel = _kernel("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", q)
        q, k, erase, _, log_decay = model_coefficients("gated_deltanet", q, k, beta_logit, log_g)
        return kernel(q.to(v.dtype), k.to(v.dtype), v, g=log_decay, beta=erase, **options)

    @staticmethod
    def _delta_rule(
        op: str, q: Tensor, k: Tensor, v: Tensor, beta_logit: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        kernel = _kernel("fla.ops.delta_rule", "chunk_delta_rule", q)
        q, k, erase, _, _ = model_coefficients(op, q, k, beta_logit, None)
        return kernel(q.to(v.dtype), k.to(v.dtype), v, beta=erase, **options)


def _kernel(module: str, name: str, q: Tensor) -> Any:
    """fla's function `name`. Raises ValueError for tensors that it does not take, or without fla."""
    if q.device.type != "cuda":
        raise ValueError(f"backend fla runs on CUDA only, the tensors are on {q.device}; use backend=torch here")
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"backend fla takes 16-bit inputs, got {q.dtype}; train in bf16 or use backend=torch")
    try:
        return getattr(import_module(module), name)
    except ImportError as missing:
        raise ValueError("backend fla needs the package flash-linear-attention, which cannot be imported") from missing


register_backend("fla", FlaBackend())
