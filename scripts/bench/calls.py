"""How each implementation computes an op from the same tensors.

`whole` maps the op's own inputs (logits of the gates) to the output; accuracy is measured with it. `timed` is what is
timed, with its own leaves: for fla's ops the kernels alone, with gates computed beforehand, which is to fla's
advantage; for EFLA on fla everything, since its gate is no part of fla.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import efla_kernels
import torch
from efla_kernels import model_coefficients, unit_norm
from torch import Tensor

from scripts.bench import mamba_calls
from scripts.bench.measure import Tensors, Unserved

CHUNK_SCAN = "mamba_chunk_scan_combined"
# our implementations by their backend; the second keeps no chunk states for the backward pass
OWN = {"ours": "triton", "ours_recompute": "triton_recompute", "torch": "torch"}


@dataclass(frozen=True)
class Call:
    """`whole(tensors) -> o`, and the timed function with its inputs."""

    whole: Callable[[Tensors], Tensor]
    timed: Callable[[Tensors], Tensor]
    leaves: Tensors


def names(op: str) -> list[str]:
    """The op's inputs in order."""
    if op == "mamba2":
        return list(mamba_calls.NAMES)
    return ["q", "k", "v", "beta_logit", *(["log_g"] if op.startswith("gated") else [])]


def make_call(op: str, impl: str, tensors: Tensors) -> Call:
    """How `impl` serves `op` on these inputs; raises `Unserved`."""
    leaves = {name: tensors[name] for name in names(op)}
    if impl in OWN:
        run = partial(_own, op, OWN[impl])
        return Call(run, run, leaves)
    if impl == "mamba_ssm":
        try:
            peer = partial(mamba_calls.mamba_ssm, mamba_calls.mamba_ssm_kernel("ssd_combined", CHUNK_SCAN))
        except (ImportError, AttributeError) as missing:
            raise Unserved(str(missing)) from missing
        return Call(peer, peer, leaves)
    try:
        kernel = _fla_kernel(op)
    except (ImportError, AttributeError) as missing:
        raise Unserved(f"fla cannot be imported: {missing}") from missing
    if op == "mamba2":
        with torch.no_grad():
            own = mamba_calls.simple_gla_inputs(tensors)
        return Call(partial(mamba_calls.simple_gla_whole, kernel), partial(mamba_calls.simple_gla, kernel), own)
    whole = partial(_fla_whole, op, kernel)
    if op == "efla":
        return Call(whole, whole, leaves)
    return Call(whole, partial(_fla_timed, op, kernel), _fla_leaves(op, tensors))


def _own(op: str, backend: str, x: Tensors) -> Tensor:
    if op == "mamba2":
        return mamba_calls.own(backend, x)
    return getattr(efla_kernels, op)(*(x[name] for name in names(op)), backend=backend)[0]


def _fla_kernel(op: str) -> Callable[..., Any]:
    module, name = {
        "deltanet": ("fla.ops.delta_rule", "chunk_delta_rule"),
        "efla": ("fla.ops.delta_rule", "chunk_delta_rule"),
        "gated_deltanet": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        "gated_efla": ("fla.ops.gdn2", "chunk_gdn2"),
        "mamba2": ("fla.ops.simple_gla", "chunk_simple_gla"),
    }[op]
    return getattr(import_module(module), name)


def _per_channel(op: str, x: Tensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gated EFLA for a rule with a gate per channel: normalised q, and decay, erase and write repeated along them."""
    q, _, erase, write, decay = model_coefficients(op, x["q"], x["k"], x["beta_logit"], x["log_g"])
    assert decay is not None
    wide = [g.unsqueeze(-1).expand_as(of).contiguous() for g, of in ((decay, q), (erase, q), (write, x["v"]))]
    return q.to(x["v"].dtype), wide[0], wide[1].to(x["v"].dtype), wide[2].to(x["v"].dtype)


def _fla_whole(op: str, kernel: Callable[..., Any], x: Tensors) -> Tensor:
    """From the logits on, differentiable to them."""
    q, k, v = x["q"], x["k"], x["v"]
    if op == "efla":
        _, _, a, _, _ = model_coefficients(op, q, k, x["beta_logit"], None)
        return kernel(unit_norm(q).to(v.dtype), k, v, beta=a)[0]
    if op == "gated_efla":
        q, g, b, w = _per_channel(op, x)
        return kernel(q, k, v, g, b, w)[0]
    beta = x["beta_logit"].float().sigmoid()
    gates = {"beta": beta} if op == "deltanet" else {"beta": beta, "g": x["log_g"]}
    return kernel(q, k, v, **gates, use_qk_l2norm_in_kernel=True)[0]


def _fla_leaves(op: str, x: Tensors) -> Tensors:
    leaves = {name: x[name] for name in "qkv"}
    with torch.no_grad():
        if op == "gated_efla":
            leaves["q"], leaves["g"], leaves["b"], leaves["w"] = _per_channel(op, x)
        else:
            leaves["beta"] = x["beta_logit"].float().sigmoid().to(x["v"].dtype)
            if op == "gated_deltanet":
                leaves["g"] = x["log_g"]
    return leaves


def _fla_timed(op: str, kernel: Callable[..., Any], x: Tensors) -> Tensor:
    options = {} if op == "gated_efla" else {"use_qk_l2norm_in_kernel": True}
    return kernel(**x, **options)[0]
