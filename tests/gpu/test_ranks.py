"""Two GPUs train as one does, with weights sharded or replicated; a run goes from two to one and back.

What is compiled is compared by `scripts.loss_equality`; here blocks are not, so that the launches are quick.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.training.corpus import write_corpus
from tests.training.launch import arguments, consumed, metrics, run_command, run_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_gpus(tmp_path: Path, precision: str) -> None:
    corpus = write_corpus(tmp_path / "tokens")
    settings = (
        "train.device=cuda", "model=gated_efla", "model.head_dim=64", f"train.precision={precision}", "train.steps=12",
        "train.compile=false",
    )  # fmt: skip
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    accelerate = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--main_process_port=0"]
    assert run_here(corpus, tmp_path, "name=one", *settings) == 0
    for launcher, mode in ((torchrun, "fsdp"), (accelerate, "ddp")):
        launch = (f"name={mode}", *settings, f"parallel={mode}", "parallel.world_size=2")
        for stop in ("train.stop_at=4", "train.stop_at=12"):
            command = [sys.executable, "-m", *launcher, "train.py", *arguments(corpus, tmp_path, *launch, stop)]
            run_command(command, expect=0)
            if stop == "train.stop_at=4":
                assert run_here(corpus, tmp_path, f"name={mode}", *settings, "train.stop_at=8") == 0
        assert consumed(tmp_path, mode) == consumed(tmp_path, "one")
        tolerance = 1e-4 if precision == "fp32" else 2e-3
        assert metrics(tmp_path, mode) == pytest.approx(metrics(tmp_path, "one"), rel=tolerance)
        first = [metrics(tmp_path, name, "grad_norm")[0] for name in (mode, "one")]
        assert first[0] == pytest.approx(first[1], rel=1e-5 if precision == "fp32" else 1e-3)
