"""Several processes train as one does: same batches, same losses, same weights, one directory, nobody left waiting.

Every launch of two processes runs in one torchrun, and so does every launch of four; the tests look at what they left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from efla_lm.run.checkpoint import newest_checkpoint, read_tensors
from efla_lm.run.verify import damage_in
from tests.training.launch import (
    MODELS,
    arguments,
    assert_same_weights,
    consumed,
    metrics,
    run_here,
    run_ranks,
    steady_rows,
    weights,
)

HERE = Path(__file__).parent
LENGTH = ("train.steps=40", "train.validate_every=20", "train.save_every=4")
PACKED = ("name=packed", "train.steps=10", "train.validate_every=10", "data.packing=documents", "data.max_documents=3")
TIED = ("name=tied", "model=gated_efla", "model.tie_word_embeddings=true", "train.steps=6")
SHORT = ("train.steps=10", "train.stop_at=3")  # stopped, so without an export
FAMILY = [(model, tied) for model in MODELS for tied in (False, True)]
FSDP, DDP = "parallel=fsdp", "parallel=ddp"
KEEPING = "train.activation_checkpointing"

pytestmark = pytest.mark.timeout(400)


def family_settings(model: str, tied: bool) -> tuple[str, ...]:
    """Each model: untied in fp32, tied in bf16. A device takes two windows at once, so all add up the same pieces.

    In bf16 one process is sharded too (over itself): it then rounds gradients where the others do. And nothing is
    clipped: the norm of all gradients adds up in another order on two ranks, a clipped step differs in the last bit of
    fp32, and of thousands of weights one may lie so that its bf16 falls the other way. Without, all bits are the same.
    """
    name, precision = f"{model}-{'tied' if tied else 'untied'}", "bf16" if tied else "fp32"
    return (
        *SHORT, f"name={name}", f"model={model}", f"model.tie_word_embeddings={tied}", f"train.precision={precision}",
        *(["train.clip_norm=null", FSDP] if tied else []),
    )  # fmt: skip


@pytest.fixture(scope="module")
def single(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of it."""
    runs = tmp_path_factory.mktemp("single")
    assert run_here(corpus, runs, "name=run", *LENGTH) == 0
    for model, tied in FAMILY:
        assert run_here(corpus, runs, *family_settings(model, tied)) == 0
    assert run_here(corpus, runs, *PACKED) == 0
    return runs


def launch_all(
    processes: int, corpus: Path, runs: Path, plan: dict[str, tuple[tuple[str, ...], list[Any] | None]]
) -> dict[str, list[int]]:
    """Run launches by name (settings, trouble); returns the exit codes of all ranks by name, and ragged results."""
    items = [
        {"arguments": arguments(corpus, runs, *settings), "trouble": trouble} for settings, trouble in plan.values()
    ]
    (runs / "plan.json").write_text(json.dumps(items))
    printed = run_ranks(processes, HERE / "ranks.py", str(runs / "plan.json"), str(runs))
    (runs / "printed.txt").write_text(printed)
    results = [json.loads((runs / f"rank-{rank}.json").read_text()) for rank in range(processes)]
    codes = {name: [result["codes"][index] for result in results] for index, name in enumerate(plan)}
    return codes | {name: [result[name] for result in results] for name in ("ragged", "collectives")}


@pytest.fixture(scope="module")
def two(corpus: Path, single: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    runs = tmp_path_factory.mktemp("two")
    assert run_here(corpus, runs, "name=from-one", *LENGTH, "train.stop_at=20") == 0
    plan: dict[str, tuple[tuple[str, ...], list[Any] | None]] = {
        "straight": (("name=straight", *LENGTH, FSDP, "parallel.world_size=2"), None),
        "from one": (("name=from-one", *LENGTH, FSDP), None),
        "to one": (("name=to-one", *LENGTH, FSDP, "train.stop_at=20"), None),
        "ddp": (("name=ddp", *LENGTH, DDP, "train.stop_at=8"), None),
        "ddp in two": (("name=ddp-in-two", *LENGTH, DDP, "train.micro_tokens=16", "train.stop_at=8"), None),
        "ddp after": (("name=ddp-after", *LENGTH, DDP, "parallel.overlap=false", "train.stop_at=8"), None),
        "ddp by fsdp": (("name=ddp-by-fsdp", *LENGTH, DDP, "train.cuda_graphs=off", "train.stop_at=8"), None),
        "modes 1": (("name=modes", *LENGTH, DDP, "train.stop_at=8"), None),
        "modes 2": (("name=modes", *LENGTH, FSDP, "train.stop_at=16"), None),
        "modes 3": (("name=modes", *LENGTH, DDP, "parallel.overlap=false", "train.stop_at=24"), None),
        "tied 1": ((*TIED, FSDP, "train.stop_at=3"), None),
        "tied 2": ((*TIED, FSDP), None),
        "packed": ((*PACKED, FSDP), None),
        "selective": (("name=selective", *LENGTH, FSDP, f"{KEEPING}=selective", "train.stop_at=4"), None),
        "kept full": (("name=kept-full", *LENGTH, FSDP, f"{KEEPING}=full", "train.stop_at=4"), None),
        "nan": (("name=nan", "train.steps=6", "train.save_every=1"), ["nan", 1, [3]]),
        "nan ddp": (("name=nan-ddp", "train.steps=6", "train.save_every=1", DDP), ["nan", 1, [3]]),
        "nans": (("name=nans", "train.steps=9", "train.max_skipped_steps=2"), ["nan", 1, [2, 3, 4]]),
        "signal": (("name=signal", "train.steps=30"), ["signal", 1, 4]),
        **{
            f"left {mode}": (
                (f"name=left-{mode}", "train.steps=8", "train.validate_every=2", f"parallel={mode}"),
                ["signal in validation", 1, call],
            )
            for mode, call in (("fsdp", 1), ("ddp", 7))  # a validation is four batches on each rank
        },
        **{
            f"{name} whole": ((f"name={name}", "train.steps=8", "train.validate_every=2", FSDP), None)
            for name in ("left-fsdp", "never-left")
        },
        "before full": (("name=full", "train.steps=9", "train.stop_at=2"), None),
        "full": (("name=full", "train.steps=9", "train.save_every=2"), ["disk", 1, None]),
        "refused": (("name=full", "train.steps=9", "seed=7"), None),
        "wrong size": (("name=wrong", "train.steps=9", "parallel.world_size=3"), None),
        "no overlap": (("name=wrong", "train.steps=9", FSDP, "parallel.overlap=false"), None),
        "wrong mesh": (("name=wrong", "train.steps=9", "parallel=hsdp", "parallel.replicate=3"), None),
        **{f"unnamed {n}": (("train.steps=1",), None) for n in range(3)},
    }
    for model, tied in FAMILY:
        plan[f"{model} {tied}"] = (family_settings(model, tied), None)
    return runs, launch_all(2, corpus, runs, plan)


Two = tuple[Path, dict[str, list[int]]]


def test_one_and_two_processes_train_alike(two: Two, single: Path) -> None:
    """Rows C3, C12, C14: batch ids, losses, gradient norms, learning rates; saving, validation and export end."""
    runs, codes = two
    assert codes["straight"] == [0, 0]
    assert consumed(runs, "straight") == consumed(single, "run")
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(runs, "straight", key) == pytest.approx(metrics(single, "run", key), rel=1e-5)
    assert metrics(runs, "straight", "lr") == metrics(single, "run", "lr")
    assert metrics(runs, "straight", "tokens") == metrics(single, "run", "tokens")
    assert_same_weights(weights(runs, "straight", 40), weights(single, "run", 40), 1e-5)
    assert (runs / "straight" / "export" / "model.safetensors").is_file()


def test_ranks_share_each_batch_without_overlap(two: Two) -> None:
    runs, _ = two
    rows = [json.loads(line) for line in (runs / "straight" / "batches.jsonl").read_text().splitlines()]
    assert all(sorted(row["by_rank"][0] + row["by_rank"][1]) == sorted(row["window_ids"]) for row in rows)
    assert all(len(row["by_rank"][0]) == len(row["by_rank"][1]) == 2 for row in rows)
    epoch = [window for row in rows for window in row["window_ids"]][:63]
    assert sorted(epoch) == list(range(63))


def test_packed_documents_on_two_processes(two: Two, single: Path) -> None:
    """The same windows of whole documents, and losses although the targets of each rank differ in number."""
    runs, codes = two
    assert codes["packed"] == [0, 0]
    assert consumed(runs, "packed") == consumed(single, "packed")
    for key in ("loss", "grad_norm", "val_loss"):
        assert metrics(runs, "packed", key) == pytest.approx(metrics(single, "packed", key), rel=1e-5)


def test_ragged_batch(two: Two) -> None:
    """Row C1 over ranks; and one rank's wish to stop reaches all."""
    from efla_lm.parallel import distributed
    from efla_lm.training.step import train_step
    from tests.training.parts import adamw, ragged_batch, sharded

    _, codes = two
    first, second = codes["ragged"]
    assert first == second and len(first) == 3
    world = distributed.start("cpu")
    model = sharded(world)
    result = train_step(model, adamw(model), [ragged_batch()], world, replicas=1, clip_norm=None, stop=True).tolist()
    distributed.finish()
    assert result[2:] == [0.0, 1.0]
    for of_two in first:
        assert of_two == pytest.approx(result, rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_one_process_without_sharding_in_bf16(corpus: Path, single: Path, tmp_path: Path, model: str) -> None:
    """Weights cast where they are used train as weights gathered in bf16 do, but for the rounding of gradients."""
    *settings, _ = family_settings(model, tied=True)
    assert run_here(corpus, tmp_path, *settings) == 0
    for key in ("loss", "grad_norm"):
        ours, sharded = metrics(tmp_path, f"{model}-tied", key), metrics(single, f"{model}-tied", key)
        assert ours[0] == pytest.approx(sharded[0], rel=1e-6 if key == "loss" else 2e-3)
        assert ours == pytest.approx(sharded, rel=5e-3)


def test_another_number_of_processes_goes_on(two: Two, single: Path, corpus: Path) -> None:
    """Row C11: saved on 1 and continued on 2, saved on 2 and continued on 1."""
    runs, codes = two
    assert codes["from one"] == codes["to one"] == [0, 0]
    assert run_here(corpus, runs, "name=to-one", *LENGTH) == 0
    for name in ("from-one", "to-one"):
        assert consumed(runs, name) == consumed(single, "run")
        assert metrics(runs, name) == pytest.approx(metrics(single, "run"), rel=1e-5)
        assert_same_weights(weights(runs, name, 40), weights(single, "run", 40), 1e-5)


def test_another_mode_goes_on(two: Two, single: Path, corpus: Path) -> None:
    """Whole on each of two ranks, then sharded, then whole again, then one process: the run that never stopped."""
    runs, codes = two
    assert all(codes[f"modes {n}"] == [0, 0] for n in (1, 2, 3))
    assert run_here(corpus, runs, "name=modes", *LENGTH) == 0
    assert consumed(runs, "modes") == consumed(single, "run")
    assert metrics(runs, "modes") == pytest.approx(metrics(single, "run"), rel=1e-5)
    assert_same_weights(weights(runs, "modes", 40), weights(single, "run", 40), 1e-5)


def test_tied_embeddings_stay_tied(two: Two, corpus: Path, tmp_path: Path) -> None:
    """Row C6: sharded, saved, loaded, trained on and exported."""
    runs, codes = two
    assert codes["tied 1"] == codes["tied 2"] == [0, 0]
    assert run_here(corpus, tmp_path, *TIED) == 0
    assert metrics(runs, "tied") == pytest.approx(metrics(tmp_path, "tied"), rel=1e-5)
    ours = weights(runs, "tied", 6)
    assert "lm_head.weight" not in ours
    assert_same_weights(ours, weights(tmp_path, "tied", 6), 1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(runs / "tied" / "export")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embeddings.weight.data_ptr()
    assert torch.equal(loaded.lm_head.weight, ours["model.embeddings.weight"])


def test_gradients_are_summed_once_per_update(two: Two) -> None:
    """Micro-batches add up on their own rank: two need the collectives of one."""
    _, codes = two
    for one, cut_in_two in codes["collectives"]:
        assert one == cut_in_two
        assert sum(count for name, count in one.items() if "scatter" in name) == 3  # two blocks and the rest


def test_activation_checkpointing_of_sharded_blocks(two: Two, single: Path) -> None:
    """Blocks whose weights are freed after the forward pass are computed again with weights gathered again."""
    runs, codes = two
    assert codes["selective"] == codes["kept full"] == [0, 0]
    for name in ("selective", "kept-full"):
        assert_same_weights(weights(runs, name, 4), weights(single, "run", 4), 1e-5)


def test_replicated(two: Two, single: Path) -> None:
    """Gradients summed in the backward pass (of an update in one part or two), after it, and by FSDP."""
    runs, codes = two
    for name in ("ddp", "ddp-in-two", "ddp-after", "ddp-by-fsdp"):
        assert codes[name.replace("-", " ")] == [0, 0]
        assert_same_weights(weights(runs, name, 8), weights(single, "run", 8), 1e-5)
        assert metrics(runs, name, "grad_norm") == pytest.approx(metrics(single, "run", "grad_norm")[:8], rel=1e-5)


@pytest.mark.parametrize(("model", "tied"), FAMILY)
def test_every_model_on_two_processes(two: Two, single: Path, model: str, tied: bool) -> None:
    """Rows C5 and C6: untied in fp32, tied in bf16."""
    runs, codes = two
    assert codes[f"{model} {tied}"] == [0, 0]
    name = f"{model}-{'tied' if tied else 'untied'}"
    assert metrics(runs, name) == pytest.approx(metrics(single, name), rel=1e-5)
    ours, theirs = weights(runs, name, 3), weights(single, name, 3)
    assert ("lm_head.weight" in ours) != tied
    assert_same_weights(ours, theirs, 0.0 if tied else 1e-5)


def test_nan_on_one_rank(two: Two) -> None:
    """Row C16: all skip together; weights and moments unchanged; counted; given up after the set number."""
    runs, codes = two
    assert codes["nan"] == codes["nan ddp"] == [0, 0] and codes["nans"] == [1, 1]
    for name in ("nan", "nan-ddp"):
        folder = runs / name / "checkpoints"
        assert_same_weights(read_tensors(folder / "step-3"), read_tensors(folder / "step-4"))
        assert read_tensors(folder / "step-6", "optim.lm_head.weight.step")["optim.lm_head.weight.step"] == 5
        assert metrics(runs, name, "skipped_steps") == [0, 0, 0, 1, 1, 1]
    assert_same_weights(weights(runs, "nan-ddp", 6), weights(runs, "nan", 6), 1e-5)
    printed = (runs / "printed.txt").read_text()
    assert "error: 2 steps in a row were not finite, the last one at step 4" in printed


def test_signal_on_one_rank(two: Two) -> None:
    runs, codes = two
    assert codes["signal"] == [0, 0]
    assert os.listdir(runs / "signal" / "checkpoints") == ["step-6"]


def test_signal_on_one_rank_in_a_validation(two: Two) -> None:
    """All ranks leave it after the same forward pass, or at its end (the signal came in its last pass), and save."""
    runs, codes = two
    assert codes["left fsdp"] == codes["left ddp"] == codes["left-fsdp whole"] == [0, 0]
    assert f"stopped after step 2 of 8: {runs}/left-fsdp/checkpoints/step-2" in (runs / "printed.txt").read_text()
    assert sorted(os.listdir(runs / "left-fsdp" / "checkpoints")) == ["step-2", "step-8"]
    # the next launch validates before it trains, and is the run that never stopped
    assert steady_rows(runs, "left-fsdp") == steady_rows(runs, "never-left")
    assert_same_weights(weights(runs, "left-fsdp", 8), weights(runs, "never-left", 8))
    # too late for the last check of that validation: the next update carries the wish
    assert os.listdir(runs / "left-ddp" / "checkpoints") == ["step-5"]
    assert len(metrics(runs, "left-ddp", "val_loss")) == 2


def test_full_disk_on_one_rank(two: Two) -> None:
    runs, codes = two
    assert codes["full"] == [1, 1]
    assert os.listdir(runs / "full" / "checkpoints") == ["step-2"]
    newest = newest_checkpoint(runs / "full")
    assert newest is not None and damage_in(newest) is None
    printed = (runs / "printed.txt").read_text()
    assert printed.count("error: no space left for") == 1


def test_refusals(two: Two) -> None:
    runs, codes = two
    assert codes["refused"] == codes["wrong size"] == codes["wrong mesh"] == [1, 1]
    printed = (runs / "printed.txt").read_text()
    assert "saved with seed=42, this run has seed=7" in printed
    assert "parallel.world_size=3 but 2 process(es) run" in printed
    assert "replicate=3" in printed
    assert codes["no overlap"] == [1, 1] and "but FSDP sums the gradients here" in printed
    assert not (runs / "wrong").exists()


def test_one_directory_per_launch(two: Two) -> None:
    """Row D7: three launches within a few seconds, without a name."""
    runs, codes = two
    assert all(codes[f"unnamed {n}"] == [0, 0] for n in range(3))
    made = sorted(path for path in runs.iterdir() if path.name.startswith("efla-tiny-"))
    assert len(made) == 3
    for path in made:
        assert sorted(p.name for p in path.glob("config*.yaml")) == ["config.yaml"]
        assert len((path / "launches.jsonl").read_text().splitlines()) == 1
        assert len(metrics(path.parent, path.name)) == 1


def test_four_processes(corpus: Path, single: Path, tmp_path: Path) -> None:
    """Meshes 1x4, 4x1, 2x2 give the weights of one process; hsdp goes on where one process goes on."""
    plan: dict[str, tuple[tuple[str, ...], list[Any] | None]] = {
        "fsdp": (("name=fsdp", *LENGTH, FSDP, "train.stop_at=4"), None),
        "ddp": (("name=ddp", *LENGTH, DDP, "train.stop_at=4"), None),
        "hsdp": (("name=hsdp", *LENGTH, "parallel=hsdp", "parallel.shard=2", "train.stop_at=4"), None),
        "mamba2": ((*family_settings("mamba2", False), "parallel=hsdp", "parallel.replicate=2"), None),
    }
    codes = launch_all(4, corpus, tmp_path, plan)
    assert all(codes[name] == [0, 0, 0, 0] for name in plan)
    for name in ("fsdp", "ddp", "hsdp"):
        assert_same_weights(weights(tmp_path, name, 4), weights(single, "run", 4), 1e-5)
    assert_same_weights(weights(tmp_path, "mamba2-untied", 3), weights(single, "mamba2-untied", 3), 1e-5)
    assert run_here(corpus, tmp_path, "name=hsdp", *LENGTH, "train.stop_at=12") == 0
    assert consumed(tmp_path, "hsdp") == consumed(single, "run")[:12]
    assert_same_weights(weights(tmp_path, "hsdp", 12), weights(single, "run", 12), 1e-5)
