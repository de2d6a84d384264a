"""Which implementation serves an op: a registry of backends by name, and the rule for "auto".

A backend is a module or object that offers some of `OPS` as callables. `delta_rule` and `ssd` receive checked arguments
with fp32 (or fp64) coefficients; a backend may also offer a model's op (`efla`, ...) and then receives q, k and the
gates' logits raw, to fuse what it likes. An op that the chosen backend lacks is a ValueError: nothing is replaced in
silence.
"""

from __future__ import annotations

import os
from typing import Any

import torch

# each public op and the core op that serves it where a backend does not fuse it
OPS = {
    "delta_rule": "delta_rule",
    "deltanet": "delta_rule",
    "efla": "delta_rule",
    "gated_deltanet": "delta_rule",
    "gated_efla": "delta_rule",
    "ssd": "ssd",
    "mamba2": "ssd",
}
GPU_BACKENDS = ("triton", "triton_recompute", "fla")
LAYER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BACKENDS: dict[str, Any] = {}


def register_backend(name: str, backend: Any) -> None:
    """Make `backend` (a module or object with callables named as in `OPS`) available as `backend=name`.

    Registering a name again replaces it. Raises ValueError for the name "auto" or where no op is offered.
    """
    if name == "auto":
        raise ValueError('backend name "auto" is reserved for the choice by device; register under another name')
    if not offered_ops(backend):
        raise ValueError(f"backend {name!r}: expected callables among {', '.join(OPS)}, got none of them")
    _BACKENDS[name] = backend


def offered_ops(backend: Any) -> list[str]:
    """The public ops that a backend serves, fused or through its core op."""
    return [op for op, core in OPS.items() if callable(getattr(backend, op, None) or getattr(backend, core, None))]


def is_registered(name: str) -> bool:
    """Whether there is a backend of this name, in a form that torch.compile of torch 2.11 can follow."""
    return name in _BACKENDS


def available_backends() -> dict[str, list[str]]:
    """The registered backends and the ops that each serves."""
    return {name: offered_ops(backend) for name, backend in _BACKENDS.items()}


def resolve_backend(name: str, device: torch.device | str, op: str = "delta_rule") -> str:
    """The backend's name that serves `op` for tensors on `device`.

    "auto" is "torch" (chunked PyTorch) on a CPU; on CUDA it is "triton" where that serves the op, else "torch". Any
    other name stands for itself. Raises ValueError for an unknown op or backend, or one that does not serve the op.
    """
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if name == "auto":
        on_cuda = torch.device(device).type == "cuda"
        return "triton" if on_cuda and op in offered_ops(_BACKENDS.get("triton")) else "torch"
    if name in _BACKENDS and op in offered_ops(_BACKENDS[name]):
        return name
    serving = ", ".join(["auto", *(n for n, ops in available_backends().items() if op in ops)])
    known = "is not built for" if name in _BACKENDS or name == "triton" else "is unknown; no such backend serves"
    raise ValueError(f"backend {name!r} {known} {op!r}; expected one of {serving}")


def lacks_gpu(name: str, device: torch.device) -> bool:
    """Whether a backend of this name is one of GPUs and `device` is a CPU, without TRITON_INTERPRET=1."""
    return name in GPU_BACKENDS and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"


def get_backend(name: str, device: torch.device | str, op: str) -> Any:
    """The backend object that `resolve_backend` names."""
    return _BACKENDS[resolve_backend(name, device, op)]


def layer_backend(backend: str, x: torch.Tensor) -> str:
    """Which form of a layer around the mixers serves x: "triton" or "torch"; the one place where that is chosen.

    "torch" and "reference" mean PyTorch. All other names mean the kernels where they can run: on CUDA (or interpreted,
    for backend "triton"), for 16-bit and fp32 inputs.
    """
    on_device = x.is_cuda or (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1")
    served = on_device and x.dtype in LAYER_DTYPES and is_registered("triton")
    return "triton" if backend not in ("torch", "reference") and served else "torch"
