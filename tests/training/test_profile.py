"""The profiler's switch: which updates are traced, what is written, and how kernels are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from efla_lm.training.profile import kind_of, union_ms
from tests.training.launch import metrics, run_here


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "products"),
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16", "products"),
        ("scan_backward_kernel", "mixer"),
        ("gradient_k_kernel", "mixer"),
        ("gradient_kernel", "mixer"),
        ("gradient_gated_kernel", "mixer"),
        ("ssd_gradient_x_kernel", "mixer"),
        ("convolution_gradient_kernel", "convolution"),
        ("cross_entropy_kernel", "loss"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimiser"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("triton_red_fused__fused_rms_norm_0", "norms and other reductions"),
        ("triton_per_fused__fused_rms_norm__to_copy__unsafe_view_add_5", "norms and other reductions"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "products"),
        ("triton_poi_fused__to_copy_6", "copies"),
        ("triton_poi_fused_mul_silu_3", "pointwise"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>", "copies"),
        ("void at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel", "copies"),
        ("something_new", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_when_something_runs() -> None:
    """Overlapping and nested kernels count once."""
    assert union_ms([(0, 1000), (500, 1500), (600, 700), (3000, 4000)]) == pytest.approx(2.5)
    assert union_ms([]) == 0


def test_run_is_traced(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(corpus, tmp_path, "name=traced", "train.steps=13", "profile=2") == 0
    folder = tmp_path / "traced" / "profile"
    table = json.loads((folder / "table.json").read_text())
    assert table["exposed communication"] == 0
    assert 0 < table["busy"] <= table["span"] and table["products"] > 0 and table["optimiser"] > 0
    total = sum(
        v for k, v in table.items() if k not in ("span", "busy", "idle", "exposed communication", "kernels", "top")
    )
    assert total <= 1.05 * table["span"]  # self times of one thread
    assert "ms per step" in (folder / "table.txt").read_text()
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert "ms per step" in capsys.readouterr().out
    assert run_here(corpus, tmp_path, "name=plain", "train.steps=13") == 0
    assert metrics(tmp_path, "traced") == metrics(tmp_path, "plain")


def test_run_too_short_to_be_traced(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(corpus, tmp_path, "name=short", "train.steps=11", "profile=2") == 0
    assert "profile=2: nothing written, it traces steps 11 to 12" in capsys.readouterr().out
    assert not (tmp_path / "short" / "profile").exists()
