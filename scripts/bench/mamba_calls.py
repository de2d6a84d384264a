"""Mamba-2 beside its peers: mamba-ssm's Triton kernels, and fla's simple_gla with B and C repeated for every head.

mamba-ssm is imported from a folder with its sources (`mamba_ssm=FOLDER`, which holds the package `mamba_ssm`) without
its package init, which needs CUDA extensions that the Triton kernels do not use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import efla_kernels
import torch
import torch.nn.functional as F
from torch import Tensor

from efla_lm.errors import UserError
from scripts.bench.measure import Tensors

NAMES = ("x", "dt", "A_log", "B", "C", "D", "dt_bias")
CHUNK = 256  # of mamba-ssm, the default of its layer


def use_mamba_ssm(folder: str | None, part: int = 0, parts: int = 1) -> None:
    """Make the package in `folder` importable; raises UserError where there is none.

    parts > 1 keeps one part of the configurations over which each kernel is tuned: processes with different parts
    compile them side by side, and the measuring process finds all of them in Triton's cache on disk.
    """
    if folder is None:
        return
    source = Path(folder) / "mamba_ssm"
    if not (source / "ops" / "triton" / "ssd_combined.py").is_file():
        raise UserError(f"mamba_ssm={folder}: expected a folder with mamba_ssm/ops/triton, as in its source archive")
    if "mamba_ssm" not in sys.modules:
        package = ModuleType("mamba_ssm")
        package.__path__ = [str(source)]
        sys.modules["mamba_ssm"] = package
    import_module("mamba_ssm.ops.triton.ssd_combined")
    if parts > 1:
        for name, module in list(sys.modules.items()):
            if name.startswith("mamba_ssm.ops.triton"):
                _keep_part(module, part, parts)


def _keep_part(module: ModuleType, part: int, parts: int) -> None:
    for kernel in vars(module).values():
        while kernel is not None and not hasattr(kernel, "configs"):  # heuristics wrap the tuner
            kernel = getattr(kernel, "fn", None) if type(kernel).__module__.startswith("triton") else None
        if kernel is not None:
            kernel.every_config = getattr(kernel, "every_config", kernel.configs)  # a process may serve several parts
            kernel.configs = kernel.every_config[part::parts] or kernel.every_config[:1]


def mamba_ssm_kernel(module: str, name: str) -> Any:
    """A function of mamba-ssm's Triton kernels; ImportError where `use_mamba_ssm` was given none."""
    if "mamba_ssm" not in sys.modules:
        raise ImportError("mamba-ssm: name the folder with its sources, mamba_ssm=FOLDER")
    return getattr(import_module(f"mamba_ssm.ops.triton.{module}"), name)


def own(backend: str, x: Tensors) -> Tensor:
    """y of our `mamba2`."""
    return efla_kernels.mamba2(*(x[name] for name in NAMES), backend=backend)[0]


def mamba_ssm(kernel: Any, x: Tensors) -> Tensor:
    """`mamba_chunk_scan_combined` from the raw steps on, as its layer calls it."""
    return kernel(
        x["x"], x["dt"], -torch.exp(x["A_log"]), x["B"], x["C"], CHUNK, D=x["D"], dt_bias=x["dt_bias"], dt_softplus=True
    )


def simple_gla_inputs(x: Tensors) -> Tensors:
    """q, k, v and g of simple_gla: C and B repeated for the heads that share them, dt x, and the decay's logarithm."""
    heads = x["x"].shape[2] // x["B"].shape[2]
    step = F.softplus(x["dt"].float() + x["dt_bias"])
    return {
        "q": x["C"].repeat_interleave(heads, 2),
        "k": x["B"].repeat_interleave(heads, 2),
        "v": (step.unsqueeze(-1) * x["x"]).to(x["x"].dtype),
        "g": -torch.exp(x["A_log"]) * step,
    }


def simple_gla(kernel: Any, x: Tensors) -> Tensor:
    """The rule alone, from what `simple_gla_inputs` gives."""
    return kernel(x["q"], x["k"], x["v"], x["g"], scale=1.0)[0]


def simple_gla_whole(kernel: Any, x: Tensors) -> Tensor:
    """From Mamba-2's own inputs, the skip included."""
    y = simple_gla(kernel, simple_gla_inputs(x))
    return (y + x["D"].unsqueeze(-1) * x["x"]).to(x["x"].dtype)


def decode_inputs(batch: int, heads: int, width: int, dtype: torch.dtype, device: str) -> Tensors:
    """Seeded arguments of `efla_kernels.mamba2_step`: `heads` heads of half the state's width, one group."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "x": normal(batch, heads, width // 2).to(dtype),
        "dt": (normal(batch, heads) - 3.5).to(dtype),
        "A_log": (1 + 15 * torch.rand(heads, generator=generator)).log(),
        "B": normal(batch, 1, width).to(dtype),
        "C": normal(batch, 1, width).to(dtype),
        "D": normal(heads),
        "dt_bias": 0.5 * normal(heads),
        "state": normal(batch, heads, width, width // 2),
    }
    return {name: x.to(device) for name, x in tensors.items()}


def mamba_ssm_step(kernel: Any, x: Tensors) -> Any:
    """A function that decodes one token with mamba-ssm's `selective_state_update`; its state is [batch, H, P, N]."""
    H, N, P = x["state"].shape[1:]
    state = x["state"].transpose(2, 3).contiguous()
    # expanded without memory, which is how its layer tells the kernel that a head has one step
    dt = x["dt"].unsqueeze(-1).expand(-1, -1, P)
    A = -torch.exp(x["A_log"]).view(H, 1, 1).expand(H, P, N)
    D, bias = (x[name].unsqueeze(-1).expand(H, P) for name in ("D", "dt_bias"))
    return lambda: kernel(state, x["x"], dt, A, x["B"], x["C"], D, dt_bias=bias, dt_softplus=True)
