"""Forecasts of memory, speed and time against computation by hand and against the graph that torch.compile cuts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import efla_kernels
import pytest
import torch
from efla_kernels.delta_rule import choices
from efla_kernels.delta_rule import triton_op as ops
from efla_kernels.layers import convolution_op as convolution
from efla_kernels.layers.convolution_torch import Inputs as ConvolutionInputs
from efla_kernels.layers.linear import linear_op
from efla_kernels.layers.residual import Stream
from efla_kernels.layers.swiglu_kernels import swiglu_op
from efla_kernels.ssd import triton_op as ssd_ops
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from efla_lm.errors import UserError
from efla_lm.models import EflaConfig
from efla_lm.models.layers import ShortConvolution
from efla_lm.models.model import EflaBlock
from efla_lm.models.sequence import SequenceInfo
from efla_lm.parallel.activation_checkpointing import checkpointed
from efla_lm.parallel.gpus import GPUS, PLANNED_GPUS, peak_flops
from efla_lm.settings import compose
from scripts.plan import cost, measured
from scripts.plan.__main__ import main as plan
from scripts.plan.forecast import clock, forecast
from scripts.plan.settings import PlanSettings

aten = torch.ops.aten
P = 374_362_112  # parameters of the 340M EFLA


def config_340m(**fields: Any) -> EflaConfig:
    return EflaConfig(**{"mixer": "efla", **fields})


def test_elements_of_a_block_by_hand() -> None:
    kernel = 8 * (64 + 64 + 128 * 128 / 64 + 128 + 8)
    mixer = 3 * 1024 + 2 * 1024 + 8 + 1024 + 16
    assert cost.saved_per_token(config_340m()) == 2 * (1024 + 2) + mixer + 2 * 2816 + kernel == 18012
    attention = cost.saved_per_token(config_340m(mixer="attention"))
    assert attention == 2 * (1024 + 2) + 4 * 1024 + 2 * 2816 + 16 == 11796


def test_memory_by_hand_on_one_device() -> None:
    m = 8 * 2048
    need = cost.memory(config_340m(), micro_tokens=m)
    assert need.weights == 4 * P
    assert need.optimizer == 8 * P
    assert need.gathered == 2 * P
    assert need.gradients == 4 * P
    assert need.activations == 2 * m * (24 * 18012 + 2 * 1024)
    assert need.loss == 4 * 2048 * 32000 + 4 * 32000 * 1024 + 2 * m * 1024
    block = (P - 2 * 32000 * 1024 - 1024) / 24
    assert need.workspace == pytest.approx(2 * m * (3 * 2816 + 2 * 1024) + 6 * block)
    start = 14 * P + need.activations + need.workspace + 4 * 32000 * 1024
    assert need.peak == pytest.approx(start), "before the first block of the backward pass lets go of anything"


def test_memory_by_hand_on_several_devices_with_accumulation() -> None:
    m, s = 4 * 2048, 8
    need = cost.memory(config_340m(), micro_tokens=m, shards=s, micro_steps=4)
    root = 2 * 32000 * 1024 + 1024
    block = (P - root) / 24
    assert need.weights + need.optimizer == 12 * P / s
    assert need.gathered == pytest.approx(2 * (root + 2 * block))
    assert need.gradients == pytest.approx(4 * P / s + 4 * P), "added up unsharded between micro-batches"
    always = need.weights + need.optimizer + need.gathered
    assert need.loss > need.workspace, "so few tokens: the peak is in the loss"
    assert need.peak == pytest.approx(always + need.gradients + need.activations + need.loss)


def test_the_loss_takes_more_rows_of_more_tokens_below_the_peak() -> None:
    m = 32 * 2048
    need = cost.memory(config_340m(), micro_tokens=m, checkpointing="selective", whole=True)
    assert need.loss == 4 * 4096 * 32000 + 4 * 32000 * 1024 + 2 * m * 1024
    assert need.loss < need.workspace + need.head, "the peak stays at the start of the backward pass"


def test_activation_checkpointing_keeps_the_inputs_of_blocks() -> None:
    m = 2048
    need = cost.memory(config_340m(), micro_tokens=m, checkpointing="full")
    assert need.activations == 2 * m * (26 * 1024 + 18012)


def test_one_process_keeps_no_second_gradients_and_casts_again() -> None:
    m = 8 * 2048
    block = (P - 2 * 32000 * 1024 - 1024) / 24
    alone = cost.memory(config_340m(), micro_tokens=m, micro_steps=2, checkpointing="selective", whole=True)
    assert alone.gathered == pytest.approx(2 * (32000 * 1024 + 2 * block))
    assert alone.gradients == 4 * P and alone.accumulates
    assert alone.activations == 2 * m * (24 * 15964 + 2 * 1024)
    again = cost.memory(config_340m(backend="triton_recompute"), micro_tokens=m, checkpointing="selective", whole=True)
    assert again.activations == 2 * m * (24 * 12380 + 2 * 1024)
    assert again.held_at_end == 2 * m * (19036 - 3584), "one block while it is computed again"
    assert cost.memory(config_340m(), micro_tokens=m, whole=True).gathered == 2 * P
    assert cost.memory(config_340m(), micro_tokens=m, whole=True, precision="fp32").gathered == 0


def test_tied_embeddings_and_fp32() -> None:
    tied = cost.memory(config_340m(tie_word_embeddings=True), micro_tokens=2048, shards=2, precision="fp32")
    root = 32000 * 1024 + 1024
    block = (P - 32000 * 1024 - root) / 24
    assert tied.gathered == pytest.approx(4 * (root + 2 * block))
    assert tied.loss == 4 * 2048 * 32000 + 4 * 32000 * 1024 + 4 * 2048 * 1024


class Cut(Exception):
    """Ends a compilation where the test has seen what it wants."""


def base(node: Any) -> Any:
    """The node whose memory this one shows."""
    while node.target in (aten.view.default, aten._unsafe_view.default, aten.alias.default):
        node = node.args[0]
    return node


def saved_by_compile(
    config: EflaConfig, batch: int, T: int, kind: str, monkeypatch: pytest.MonkeyPatch, keep_states: bool = True
) -> tuple[float, float, list[list[int]]]:
    """What the compiled block hands to its backward pass: elements of activations per token (fp32 counts twice), and
    bytes of weights in the compute type; then the channels of all parts that each of its convolutions makes.

    The graph is that of one process on a GPU: fp32 masters, the kernels' ops with their buffers, no data.
    """

    def convolve(self: ShortConvolution, x: Tensor, state: None, info: Any, scale: Tensor) -> tuple[Tensor, ...]:
        inputs = ConvolutionInputs(x, self.weight, None, None, None, scale, list(self.widths))
        return *convolution.convolve(inputs, self.last_apart), x[:, T - 3 :]

    def rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *decay: Tensor, **options: Any) -> tuple[Tensor, None]:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        log_g = decay[0] if decay else None
        mode = choices.MODES[config.mixer]
        return ops.delta.op(q, k, v, beta, None, log_g, None, None, mode, 0.1, 1, False, keep_states)[0], None

    def duality(x, dt, A_log, B, C, D, dt_bias, **options: Any) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        steps = (None, A_log, dt_bias, D, None)
        return ssd_ops.duality.op(x, dt, B, C, *steps, None, None, False, keep_states)[0], None

    def project(gate_up: Tensor, weight: Tensor, *, row_scale: Tensor, residual: Stream, backend: str) -> Tensor:
        return swiglu_op.op(gate_up.flatten(0, 1), weight, row_scale.flatten(), *residual.rows()).view(batch, T, -1)

    def add(x: Tensor, weight: Tensor, *, residual: Stream, backend: str) -> Tensor:
        return linear_op.op(x.flatten(0, 1), weight, *residual.rows()).view(batch, T, -1)

    found: list[tuple[float, float, list[list[int]]]] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        activations = weights = 0.0
        for node in {base(node) for node in output.args[0][num_fwd_outputs:]}:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or (node.op == "placeholder" and value.dim() < 3):
                continue  # a master is there anyway
            nbytes = value.numel() * value.element_size()
            if value.dim() < 3 and value.shape[0] % (batch * T):
                weights += nbytes
            else:
                activations += nbytes / 2 / (batch * T)
        convolved = torch.ops.efla_kernels.convolution.default
        again = [list(node.args[-1]) for node in backward.graph.nodes if node.target == convolved]
        found.append((activations, weights, again))
        raise Cut

    monkeypatch.setattr(ShortConvolution, "forward", convolve)
    monkeypatch.setattr(efla_kernels, "swiglu_linear", project)
    monkeypatch.setattr(efla_kernels, "linear", add)
    block = EflaBlock(config).train()
    if config.mixer == "mamba2":
        monkeypatch.setattr(efla_kernels, "mamba2", duality)
    elif config.mixer != "attention":
        block.mixer.rule = rule  # type: ignore[assignment]
    x = torch.zeros(batch, T, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    info = SequenceInfo(batch, T, x.device)
    if config.mixer == "attention":
        info = info.for_attention(config.head_dim, config.rope_theta)
    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=select_decomp_table()
    )
    with pytest.raises(Exception, match="Cut"):
        torch.compile(checkpointed(block.forward, kind), fullgraph=True, backend=backend)(x, info)
    (one,) = found
    return one


@pytest.mark.parametrize("mixer", ["efla", "gated_efla", "deltanet", "gated_deltanet", "mamba2"])
@pytest.mark.parametrize("kind", ["none", "selective", "products"])
@pytest.mark.parametrize("keep_states", [True, False])
def test_elements_of_a_block_are_those_that_compile_keeps(
    mixer: str, kind: str, keep_states: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = "auto" if keep_states else "triton_recompute"
    config = EflaConfig(mixer=mixer, hidden_size=256, num_heads=2, head_dim=128, intermediate_size=704, backend=backend)
    found, weights, convolved = saved_by_compile(config, 4, 512, kind, monkeypatch, keep_states)
    assert found == pytest.approx(cost.saved_per_token(config, checkpointing=kind), rel=0.03)
    copies = 2 * sum(p.numel() for p in EflaBlock(config).parameters()) if kind == "none" else 0
    assert weights == pytest.approx(copies, rel=0.01)
    if kind == "selective" and mixer != "mamba2":
        gated = mixer in ("gated_efla", "gated_deltanet")
        # v is computed again for the rules that read it
        assert convolved == ([[256] * 3] if gated or not keep_states else [[256] * 2])


def test_the_largest_micro_batch_is_the_last_even_cut_that_fits() -> None:
    gpu, options = GPUS["a100-80gb"], {"context": 2048, "windows": 64, "margin": 0.08, "shards": 8}
    largest = cost.largest_micro_batch(config_340m(), gpu, **options)
    assert largest is not None and 64 % largest == 0

    def need(micro: int) -> float:
        return cost.memory(config_340m(), micro_tokens=micro * 2048, shards=8, micro_steps=64 // micro).peak_gib

    assert need(largest) <= 0.92 * gpu.memory_gib < need(2 * largest)
    assert cost.largest_micro_batch(config_340m(), cost.Gpu(2.0, 1e12), **options) is None


def test_duration_by_hand() -> None:
    time = cost.duration(8 * 2**30, 200_000.0, gpus=8, efficiency=0.9)
    assert time.tokens_per_second == 1_440_000
    assert time.seconds == pytest.approx(8 * 2**30 / 1.44e6)
    assert time.gpu_hours == pytest.approx(8 * time.seconds / 3600)
    assert time.days == pytest.approx(time.seconds / 86400)
    assert cost.duration(100, 10.0, gpus=1, efficiency=0.9).seconds == 10
    assert [clock(s) for s in (59, 3600 * 5 + 60, 86400 * 3 + 7200)] == ["1 min", "5 h 1 min", "3 d 2 h"]


ROWS = [
    {"model": "efla", "size": "340m", "impl": "efla_lm", "batch": 8, "tokens": 2048, "gpus": 1,
     "tokens_per_second": 150e3, "mfu": 0.35, "gpu": "NVIDIA H200"},
    {"model": "efla", "size": "340m", "impl": "efla_lm", "batch": 32, "tokens": 2048, "gpus": 1,
     "tokens_per_second": 200e3, "mfu": 0.45, "gpu": "NVIDIA H200"},
    {"model": "efla", "size": "340m", "impl": "efla_lm", "batch": 1, "tokens": 16384, "gpus": 1,
     "tokens_per_second": 140e3, "mfu": 0.33, "gpu": "NVIDIA H200"},
    {"model": "efla", "size": "340m", "impl": "fla", "batch": 32, "tokens": 2048, "gpus": 1,
     "tokens_per_second": 100e3, "mfu": 0.25, "gpu": "NVIDIA H200"},
    {"model": "deltanet", "size": "340m", "impl": "efla_lm", "batch": 8, "tokens": 2048, "gpus": 1,
     "tokens_per_second": None, "mfu": None, "gpu": "NVIDIA H200"},
]  # fmt: skip


def speed(folder: Path, gpu: str = "h200-141gb", model: str = "efla", **options: Any) -> measured.Speed:
    arguments = {"micro_tokens": 8 * 2048, "context": 2048, "flops_per_token": 2e9, **options}
    return measured.device_speed(model, "340m", gpu, folder=folder, **arguments)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_measurement_of_the_nearest_micro_batch_is_taken(wrapped: bool, tmp_path: Path) -> None:
    (tmp_path / "throughput_h200.json").write_text(json.dumps({"rows": ROWS} if wrapped else ROWS))
    found = speed(tmp_path)
    assert (found.tokens_per_second, found.is_measured) == (150e3, True)
    assert speed(tmp_path, context=16384).tokens_per_second == 140e3
    assert speed(tmp_path, micro_tokens=65536).tokens_per_second == 200e3
    assert speed(tmp_path, checkpointing=True).tokens_per_second == pytest.approx(112.5e3)


def test_a_measurement_of_another_context_is_taken_by_its_work(tmp_path: Path) -> None:
    """Attention's FLOPs per token grow with the context, and its speed falls by as much."""
    row = ROWS[0] | {"mfu_with_mixing": 0.4}
    (tmp_path / "throughput_h200.json").write_text(json.dumps([row]))
    assert speed(tmp_path, context=row["tokens"], flops_per_token=4e9).tokens_per_second == row["tokens_per_second"]
    longer = speed(tmp_path, context=8 * row["tokens"], flops_per_token=4e9)
    assert longer.tokens_per_second == pytest.approx(0.4 * 989e12 / 4e9) and longer.is_measured


def test_one_gpu_is_measured_better_than_several(tmp_path: Path) -> None:
    """What several lose to each other is `efficiency`, which is not to be counted twice."""
    path = tmp_path / "throughput_h200.json"
    path.write_text(json.dumps([ROWS[0] | {"gpus": 2, "batch": 8}, ROWS[1]]))
    assert speed(tmp_path).tokens_per_second == ROWS[1]["tokens_per_second"]
    two = measured.rows_of(path)[:1]
    only = measured.device_speed("efla", "340m", "h200-141gb", micro_tokens=1, context=1, flops_per_token=1, rows=two)
    assert only.tokens_per_second == ROWS[0]["tokens_per_second"] / 2


def test_what_is_assumed_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "throughput_h200.json").write_text(json.dumps(ROWS))
    other_gpu = speed(tmp_path, "a100-80gb")
    assert other_gpu.tokens_per_second == pytest.approx(0.35 * 312e12 / 2e9)
    given = speed(tmp_path, mfu=0.5)
    assert given.tokens_per_second == pytest.approx(0.5 * 989e12 / 2e9)
    other_model = speed(tmp_path, model="deltanet")
    assert other_model.tokens_per_second == pytest.approx(measured.ASSUMED_MFU * 989e12 / 2e9)
    assert all("assumed" in found.source and not found.is_measured for found in (other_gpu, given, other_model))


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "throughput_h200.json").write_text('{"no": 1}')
    with pytest.raises(UserError, match="is not a table of throughput"):
        speed(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "shards"),
    [(["gpus=1"], 1), (["gpus=8"], 8), (["gpus=8", "parallel=ddp"], 1), (["gpus=16", "parallel=hsdp"], 8),
     (["gpus=16", "parallel=hsdp", "parallel.shard=4"], 4)],
)  # fmt: skip
def test_the_state_is_shared_as_training_shards_it(overrides: list[str], shards: int) -> None:
    settings = compose("plan", overrides, PlanSettings)
    found = forecast(settings, gpus=settings.gpus, gpu=settings.gpu)
    assert found.shards == shards
    assert found.parameters == P
    assert found.budget.steps == 8192


def test_the_command_prints_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run(["experiment=table1_1b3", "gpus=8", "gpu=a100-80gb", "price=2", "mfu=0.4"]) == 0
    shown = capsys.readouterr().out
    for part in ("1,365,677,056", "25,600 steps", "GiB at the peak", "largest micro-batch", "GPU-hours", "price"):
        assert part in shown
    assert "assumed: the given mfu=0.4" in shown
    assert plan.run(["gpus=3"]) == 1
    assert plan.run(["gpu=abacus"]) == 2
    assert plan.run(["mfu=2"]) == 1


SPREAD = ["gpus=64", "gpu=h200-141gb", "data.context=2048", "train.micro_batch=4", "mfu=0.4"]


def test_several_machines_lose_to_their_network() -> None:
    """By hand: 8 machines, P parameters; a quarter of the time of the network is lost, or what the work cannot hide."""
    assert cost.network_bytes(P, gpus=8, shards=8, micro_steps=4) == 0
    assert cost.network_bytes(P, gpus=64, shards=64, micro_steps=3) == 7 / 8 * 16 * P
    assert cost.network_bytes(P, gpus=64, shards=8, micro_steps=3) == 7 / 8 * 8 * P
    assert cost.network_share(50e9, step_seconds=2.0, gigabytes_per_second=50) == 2 / 2.25
    assert cost.network_share(50e9, step_seconds=0.5, gigabytes_per_second=50) == 0.5
    settings = compose("plan", [*SPREAD, "train.batch_tokens=1048576", "parallel=fsdp"], PlanSettings)
    found = forecast(settings, gpus=64, gpu=settings.gpu, mfu=0.4)
    one = compose("plan", [*SPREAD, "gpus=8", "train.batch_tokens=131072", "parallel=fsdp"], PlanSettings)
    near = forecast(one, gpus=8, gpu=one.gpu, mfu=0.4)
    assert found.duration.tokens_per_second < 0.95 * 8 * near.duration.tokens_per_second


def test_hsdp_is_suggested_where_the_state_spans_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.run([*SPREAD, "train.batch_tokens=1048576", "parallel=fsdp"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "parallel=hsdp, one copy of the state for each machine" in shown
    assert "(network=50 GB/s between machines, assumed)" in shown
    assert plan.run([*SPREAD, "train.batch_tokens=1048576", "parallel=hsdp"]) == 0
    assert plan.run(["gpus=8", "parallel=fsdp"]) == 0
    assert "beside it" not in capsys.readouterr().out


def test_what_does_not_fit_has_no_time_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names what to set instead, and that fits."""
    recipe = ["size=1b3", "gpus=1", "gpu=a100-80gb", "data.context=2048", "train.batch_tokens=131072"]
    assert plan.run([*recipe, "train.micro_batch=64"]) == 1
    shown = capsys.readouterr()
    assert "DOES NOT FIT" in shown.out and "GPU-hours" not in shown.out and "days" not in shown.out
    (line,) = shown.err.splitlines()
    instead = line.rsplit("set ", 1)[1]
    assert instead.startswith("train.micro_batch=")
    assert plan.run([*recipe, instead]) == 0
    assert plan.run([*recipe, "train.micro_batch=1", "gpu=rtx4090-24gb"]) == 1
    assert "share the state between more GPUs" in capsys.readouterr().err


def test_one_table_of_gpus() -> None:
    """The driver's names find the right row, and plan offers the GPUs whose memory is known."""
    peaks = {
        "NVIDIA H200": 989e12, "NVIDIA GH200 480GB": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 NVL": 835e12,
        "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA B200": 2250e12, "NVIDIA L40S": 362e12,
        "NVIDIA L4": 121e12, "NVIDIA A40": 149.7e12, "NVIDIA RTX A6000": 154.8e12,
        "NVIDIA GeForce RTX 4090": 165.2e12, "Radeon": None,
    }  # fmt: skip
    assert {name: peak_flops(name) for name in peaks} == peaks
    offered = ("a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200-180gb", "l40s-48gb", "rtx4090-24gb")
    assert offered == PLANNED_GPUS
    assert all(GPUS[name].memory_gib > 20 for name in offered)
