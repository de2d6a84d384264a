"""Start-up: launchers, devices, meshes, and input that cannot be trained on. One line, no run directory left."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from efla_kernels.backends import GPU_BACKENDS

from efla_lm.errors import UserError
from efla_lm.parallel import distributed
from efla_lm.parallel.distributed import World, build_mesh, start
from efla_lm.run.directory import DirectoryLock
from tests.training.launch import arguments, run_command, run_here

Captured = pytest.CaptureFixture[str]


def error_of(capsys: Captured) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def test_accelerate_without_gpus(corpus: Path, tmp_path: Path) -> None:
    """Row D13: asked for two processes, it starts one without a rank; that one must not train alone."""
    if torch.cuda.is_available():
        pytest.skip("accelerate starts the processes where there are GPUs")
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "train.py"]
    code, printed = run_command([*accelerate, *arguments(corpus, tmp_path, "train.steps=2")])
    assert code != 0
    assert "error: accelerate was asked for several processes but started one" in printed
    assert "torchrun --nproc-per-node=N" in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "environment",
    [
        {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"},
        {"SLURM_STEP_NUM_TASKS": "2"},
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_SIZE": "2"},
    ],
    ids=lambda environment: next(iter(environment)),
)
def test_processes_that_do_not_know_each_other(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun"):
        distributed._refuse_lonely_process()


@pytest.mark.parametrize(
    "environment",
    [{"ACCELERATE_MIXED_PRECISION": "no"}, {"MASTER_PORT": "29500"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"PMI_SIZE": ""}],
    ids=str,
)
def test_one_process_that_was_asked_for(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    distributed._refuse_lonely_process()


def test_world_of_one() -> None:
    world = start("cpu", world_size=1)
    try:
        assert (world.rank, world.size, world.is_main, world.device.type) == (0, 1, True, "cpu")
        assert world.gather(3) == [3] and world.broadcast("x") == "x" and world.on_main(lambda: 5) == 5
        assert build_mesh(world, "auto").shape == build_mesh(world, "hsdp").shape == (1, 1)
        with pytest.raises(UserError, match=r"parallel\.world_size=2 but 1 process"):
            start("cpu", world_size=2)
    finally:
        distributed.finish()


@pytest.mark.parametrize(("backend", "failed"), [("nccl", True), ("nccl", False), ("gloo", True), ("gloo", False)])
def test_end_of_the_process_group(backend: str, failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error NCCL's communicators are aborted, which waits for no peer, and torch does not warn at exit."""
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: calls.append("abort"))
    with contextlib.suppress(UserError), distributed.leaving_process_group():
        if failed:
            raise UserError("a mistake")
    assert calls == ([] if failed and backend == "gloo" else ["abort" if failed else "destroy"])


@pytest.mark.parametrize(
    ("mode", "sizes", "said"),
    [
        ("single", {}, "replicate=1 x shard=1 = 1 ranks, but 8 process"),
        ("ddp", {"shard": 2}, "mode=ddp cannot have replicate=8, shard=2"),
        ("fsdp", {"replicate": 2}, "mode=fsdp cannot have replicate=2, shard=8"),
        ("hsdp", {"replicate": 3, "shard": 2}, "replicate=3 x shard=2 = 6 ranks, but 8"),
        ("hsdp", {"shard": 3}, "replicate=2 x shard=3 = 6 ranks, but 8"),
        ("sideways", {}, "expected auto, single, ddp, fsdp or hsdp, got 'sideways'"),
    ],
)
def test_mesh_that_does_not_fit(mode: str, sizes: dict[str, int], said: str) -> None:
    group: Any = None
    world = World(rank=0, size=8, local_size=4, device=torch.device("cpu"), control=group)
    with pytest.raises(UserError, match=said):
        build_mesh(world, mode, **sizes)


def test_cuda_asked_for_where_there_is_none(corpus: Path, tmp_path: Path, capsys: Captured) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run_here(corpus, tmp_path, "train.device=cuda") == 1
    assert "torch sees no CUDA device" in error_of(capsys)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.vocab_size=50"], "has 61 ids, the model has vocab_size=50"),  # row B10
        (["data.dir=nowhere"], "python -m scripts.prepare"),
        (["data.bos=true"], "was made with data.bos=false"),
        (["data.context=2000", "train.batch_tokens=4000", "train.micro_tokens=2000"], "fewer than one sequence"),
        (["train.batch_tokens=65"], "multiple of data.context=16"),
        (["train.micro_tokens=null", "train.micro_batch=3"], "train.micro_batch=3"),
        *((["train.device=cpu", f"model.backend={name}"], f"{name} needs a GPU") for name in GPU_BACKENDS),
        (["model=mamba2", "model.backend=fla", "train.device=cpu"], "model.backend=fla needs a GPU"),
        (["model=transformer", "model.backend=reference"], "torch's SDPA only"),
        (["train.device=cpu", "train.cuda_graphs=on"], "train.cuda_graphs=on needs CUDA devices"),
        (["parallel.overlap=false"], "parallel.overlap=false belongs to parallel=ddp with several processes"),
        (["parallel.overlap=false", "parallel=ddp"], "one process runs: leave parallel.overlap out"),
        (["model=transformer", "model.head_dim=15"], "model: rotary embedding needs an even head_dim"),
        (["model=efla", "train.device=cpu", "resume=nowhere"], "no checkpoint here"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_input_that_cannot_be_meant(
    corpus: Path, tmp_path: Path, overrides: list[str], said: str, capsys: Captured
) -> None:
    assert run_here(corpus, tmp_path, "train.steps=2", *overrides) == 1
    assert said in error_of(capsys)
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written(corpus: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    for runs, why in ((tmp_path / "file", "file exists"), (tmp_path / "file" / "below", "not a directory")):
        assert run_here(corpus, runs, "train.steps=2") == 1
        said = f"{runs}: {why} (runs_dir={runs}); a file is in the way: choose another place, or move it"
        assert said in error_of(capsys)
    assert run_here(corpus, tmp_path, "train.steps=2", "name=" + "x" * 300) == 1
    said = error_of(capsys)
    assert f"file name too long (runs_dir={tmp_path}); choose a shorter name" in said
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "permission denied (runs_dir={0}); choose a place that you may use, or change its rights"),
        (errno.EROFS, "read-only file system (runs_dir={0}); choose a place that can be written"),
    ],
)
def test_runs_dir_that_may_not_be_written(
    corpus: Path, tmp_path: Path, number: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    runs, plain = tmp_path / "a" / "runs", os.mkdir

    def refused(path: str, *args: object, **kwargs: object) -> None:
        if Path(path) == tmp_path / "a":
            raise OSError(number, os.strerror(number), str(path))
        plain(path, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "mkdir", refused)
    assert run_here(corpus, runs, "train.steps=2") == 1
    assert f"{tmp_path}/a: {said.format(runs)}" in error_of(capsys)


@pytest.mark.parametrize("file", ["metrics.jsonl", "config.yaml"])
def test_full_disk_names_the_file_and_runs_dir(
    corpus: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """What writes into an open file gets an error of the system that names none."""

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write" if file == "metrics.jsonl" else "fsync", full)
    if file == "config.yaml":
        monkeypatch.setattr(DirectoryLock, "_acquire", lambda self: None)
    assert run_here(corpus, tmp_path, "train.steps=2", "name=run") == 1
    said = error_of(capsys)
    assert f"no space left on the disk while writing {tmp_path}/run/{file}; free some and start again" in said
    assert f"or change runs_dir={tmp_path}" in said


def test_token_files_without_their_tokenizer(corpus: Path, tmp_path: Path, capsys: Captured) -> None:
    shutil.copytree(corpus, tmp_path / "tokens")
    shutil.rmtree(tmp_path / "tokens" / "tokenizer")
    assert run_here(tmp_path / "tokens", tmp_path / "runs", "train.steps=2") == 1
    assert "tokenizer: expected tokenizer.json, found none" in error_of(capsys)
    assert not (tmp_path / "runs").exists()


def test_no_held_out_split(corpus: Path, tmp_path: Path) -> None:
    from efla_data.corpus.writer import write_token_files

    from tests.training.launch import metrics

    folder = tmp_path / "tokens"
    write_token_files(folder, {"train": [[*range(1, 60), 0]] * 20}, 61, 0)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    assert run_here(folder, tmp_path / "runs", "name=run", "train.steps=2", "train.validate_every=1") == 0
    assert metrics(tmp_path / "runs", "run", "val_loss") == []
