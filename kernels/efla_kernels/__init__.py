"""Ops of EFLA, Gated EFLA, DeltaNet, Gated DeltaNet and Mamba-2; the derivation is in delta_rule/README.md."""

from importlib.util import find_spec
from types import SimpleNamespace

from efla_kernels.backends import available_backends, register_backend, resolve_backend
from efla_kernels.delta_rule import chunked as _chunked
from efla_kernels.delta_rule import reference as _reference
from efla_kernels.delta_rule.coefficients import (
    beta_gate,
    erase_write_efla,
    gated_coefficients,
    relative_exp,
    relative_exp_slope,
    scaled_values,
    squared_norm,
    unit_norm,
)
from efla_kernels.delta_rule.decode import decode_step, fuses_decoding
from efla_kernels.delta_rule.last_token import last_weights
from efla_kernels.delta_rule.ops import delta_rule, deltanet, efla, gated_deltanet, gated_efla, model_coefficients
from efla_kernels.layers.convolution import convolution_state, short_convolution
from efla_kernels.layers.cross_entropy import linear_cross_entropy
from efla_kernels.layers.linear import linear
from efla_kernels.layers.norm_linear import norm_linear
from efla_kernels.layers.residual import Stream
from efla_kernels.layers.swiglu import swiglu_linear
from efla_kernels.layers.unit_norm import unit_rms_norm
from efla_kernels.ssd import chunked as _ssd_chunked
from efla_kernels.ssd import reference as _ssd_reference
from efla_kernels.ssd.ops import fuses_mamba2_step, mamba2, mamba2_step, ssd

for _name, _delta, _ssd in (("torch", _chunked, _ssd_chunked), ("reference", _reference, _ssd_reference)):
    register_backend(_name, SimpleNamespace(delta_rule=_delta.delta_rule, ssd=_ssd.ssd))
if find_spec("triton") is not None:  # Linux only
    from efla_kernels.delta_rule import triton_op as _triton
    from efla_kernels.launch import interpreter as _interpreter
    from efla_kernels.launch.choices import interpreted as _interpreted
    from efla_kernels.ssd.triton_op import ssd_ops as _ssd_ops

    for _name, _recompute in (("triton", False), ("triton_recompute", True)):
        _backend = SimpleNamespace(**vars(_triton.delta_ops(_recompute)), **vars(_ssd_ops(_recompute)))
        register_backend(_name, _interpreter.upcasting_backend(_backend) if _interpreted() else _backend)

__all__ = [
    "Stream",
    "available_backends",
    "beta_gate",
    "convolution_state",
    "decode_step",
    "delta_rule",
    "deltanet",
    "efla",
    "erase_write_efla",
    "fuses_decoding",
    "fuses_mamba2_step",
    "gated_coefficients",
    "gated_deltanet",
    "gated_efla",
    "last_weights",
    "linear",
    "linear_cross_entropy",
    "mamba2",
    "mamba2_step",
    "model_coefficients",
    "norm_linear",
    "register_backend",
    "relative_exp",
    "relative_exp_slope",
    "resolve_backend",
    "scaled_values",
    "short_convolution",
    "squared_norm",
    "ssd",
    "swiglu_linear",
    "unit_norm",
    "unit_rms_norm",
]
