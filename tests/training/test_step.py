"""The arithmetic of a step: loss and gradient by global count, clipping, decay, skipped steps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from efla_data.loader.batches import Batch, TrainLoader
from efla_data.loader.sequences import StreamSequences
from efla_data.loader.token_file import TokenFile
from torch import nn

from efla_lm.errors import UserError
from efla_lm.models import EflaForCausalLM, initialise
from efla_lm.models.rules import RULES
from efla_lm.parallel import distributed
from efla_lm.run.checkpoint import read_tensors
from efla_lm.settings import LoopSettings
from efla_lm.training import optim, trainer
from efla_lm.training.batch_plan import BatchPlan, plan_batches
from efla_lm.training.step import StepResults, train_step
from tests.training.corpus import write_corpus
from tests.training.launch import MODELS, assert_same_weights, metrics, run_here
from tests.training.parts import adamw, cut, not_finite_at, ragged_batch, sharded, tiny_config, whole

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def world() -> Iterator[distributed.World]:
    yield distributed.start("cpu")
    distributed.finish()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: distributed.local(p.grad).clone() for name, p in model.named_parameters()}


def test_cut_of_the_batch_does_not_matter(world: distributed.World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row C1: 1x8, 2x4, 8x1 give loss and gradients of a plain model on the whole batch, as a mean over targets."""
    batch = ragged_batch()
    plain = EflaForCausalLM(tiny_config())
    initialise(plain, 0)
    count = (batch.targets != -100).sum()
    assert count < batch.targets.numel() / 2
    loss = plain(input_ids=batch.input_ids, targets=batch.targets).loss / count
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    monkeypatch.setattr(optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)  # to look at them afterwards
    for size in (8, 4, 2, 1):
        model = sharded(world)
        result = train_step(model, adamw(model, 0.0), cut(batch, size), world, replicas=1, clip_norm=None, stop=False)
        assert result[0].item() == pytest.approx(loss.item(), rel=1e-6)
        assert result[1].item() == pytest.approx(norm.item(), rel=1e-5)
        for name, grad in gradients(model).items():
            assert (grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-9, name


def test_clipping_and_no_target_at_all(world: distributed.World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.AdamW, "zero_grad", lambda self, set_to_none=True: None)
    model = sharded(world)
    norm = train_step(model, adamw(model, 0.0), [ragged_batch()], world, replicas=1, clip_norm=0.5, stop=False)[1]
    clipped = torch.stack([grad.norm() for grad in gradients(model).values()]).norm()
    assert norm > 0.6  # what is logged is the norm before clipping
    assert clipped.item() == pytest.approx(0.5, rel=1e-5)
    model = sharded(world)
    empty = ragged_batch()
    empty.targets.fill_(-100)
    result = train_step(model, adamw(model), [empty], world, replicas=1, clip_norm=0.5, stop=True)
    assert result.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert all(torch.isfinite(distributed.local(p)).all() for p in model.parameters())


@pytest.mark.parametrize("how", ["sharded", "whole"])
def test_a_batch_without_targets_is_skipped(world: distributed.World, how: str) -> None:
    """AdamW would move the weights by its moments and decay them. A micro-batch without targets does no harm."""
    model = sharded(world) if how == "sharded" else whole(overlap=False)
    optimizer, results = adamw(model), StepResults(max_skipped=2)
    empty = ragged_batch()
    empty.targets.fill_(-100)

    def step(number: int, *batches: Batch) -> None:
        results.add(number, train_step(model, optimizer, batches, world, replicas=1, clip_norm=1.0, stop=False))

    def state() -> list[torch.Tensor]:
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return [distributed.local(tensor.detach()).clone() for tensor in (*model.parameters(), *moments)]

    step(1, ragged_batch())
    before = state()
    step(2, empty, empty)
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    last = results.settle()
    assert last.skipped and math.isnan(last.loss) and results.skipped == 1
    step(3, empty, ragged_batch())
    assert not results.settle().skipped and not torch.equal(before[0], state()[0])
    step(4, empty)
    with pytest.raises(UserError, match="2 steps in a row were skipped, and the batch of the last one, step 5, has no"):
        step(5, empty)


def test_a_run_without_any_target(tmp_path: Path, capsys: Captured) -> None:
    """Each document is its EOS alone, and the switch ignores what follows an EOS: nothing is trained or validated."""
    folder = write_corpus(tmp_path / "tokens", documents=[[0]] * 300)
    settings = ("name=run", "train.steps=4", "train.validate_every=2", "train.save_every=1")
    assert run_here(folder, tmp_path, *settings, "data.mask_boundaries=true") == 0
    assert metrics(tmp_path, "run", "skipped_steps") == [1, 2, 3, 4]
    assert metrics(tmp_path, "run") == metrics(tmp_path, "run", "clip_scale") == [None] * 4
    assert metrics(tmp_path, "run", "val_loss") == [None, None]
    out = capsys.readouterr().out
    assert "step 2/4  no validation loss: the held-out data have no targets" in out and "validation loss nan" not in out
    folder = tmp_path / "run" / "checkpoints"
    assert_same_weights(read_tensors(folder / "step-3"), read_tensors(folder / "step-4"))


@pytest.mark.parametrize("model_name", MODELS)
def test_what_decays(world: distributed.World, model_name: str) -> None:
    mixer = "attention" if model_name == "transformer" else model_name
    model = sharded(world, mixer=mixer)
    decays = optim.decayed(model)
    free = {name for name, _ in model.named_parameters()} - decays
    assert {"model.embeddings.weight", "lm_head.weight"} <= decays
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    assert all(shapes[name] == 2 and name.endswith(".weight") for name in decays)
    marks = ("norm", "conv", "bias", "A_log", "dt_bias", ".D")
    assert free and all(any(mark in name for mark in marks) for name in free), free
    assert not any(mark in name for name in decays for mark in marks)
    optimizer = adamw(model, lr=0.5, weight_decay=0.1)
    before = {name: distributed.local(p.detach()).clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optim.step_unless(optimizer, torch.tensor(False), torch.tensor(1.0), 0.0)
    for name, parameter in model.named_parameters():
        factor = 0.95 if name in decays else 1.0
        torch.testing.assert_close(distributed.local(parameter.detach()), before[name] * factor)


def test_tied_embedding_decays_once(world: distributed.World) -> None:
    model = sharded(world, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embeddings.weight
    decays = optim.decayed(model)
    assert "model.embeddings.weight" in decays and "lm_head.weight" not in decays
    parameters = [p for group in adamw(model).param_groups for p in group["params"]]
    assert len(parameters) == len({id(p) for p in parameters}) == len(list(model.parameters()))


def test_masters_must_be_fp32(world: distributed.World) -> None:
    model = EflaForCausalLM(tiny_config()).to(torch.bfloat16)
    mesh = distributed.build_mesh(world, "single")
    with pytest.raises(ValueError, match=r"master weights must be float32.*the first is model\.embeddings\.weight"):
        distributed.shard_model(model, list(model.model.layers), mesh, "bf16")
    with pytest.raises(ValueError, match="must be float32"):
        optim.build_optimizer(model, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_no_sharded_block_returns_a_view(world: distributed.World, checkpointed: bool, mixer: str, mlp: bool) -> None:
    """FSDP warns of them, since one that is changed in place loses its hook."""
    model, batch = sharded(world, "fp32", mixer=mixer, mlp=mlp), ragged_batch()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*returned a view tensor")
        model.train()(batch.input_ids, targets=batch.targets).loss.backward()


@pytest.mark.parametrize("mixer", ["gated_efla", "mamba2"])
def test_bf16_computes_in_bf16_and_keeps_fp32(world: distributed.World, mixer: str) -> None:
    """Row C5 on one rank: matrices are used in bf16, decay parameters in fp32, masters and moments are fp32."""
    model = sharded(world, "bf16", mixer=mixer)
    seen: dict[str, torch.dtype] = {}

    def note(module: nn.Module, args: tuple[object, ...]) -> None:
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                seen[name if distributed.is_whole(name) else type(part).__name__] = parameter.dtype

    for module in (model.model.embeddings, *(block.mixer for block in model.model.layers)):
        module.register_forward_pre_hook(note)
    optimizer = adamw(model)
    result = train_step(model, optimizer, cut(ragged_batch(), 4), world, replicas=1, clip_norm=1.0, stop=False)
    assert torch.isfinite(result).all()
    assert seen["Linear"] == seen["Embedding"] == seen["ShortConvolution"] == torch.bfloat16
    assert seen["A_log"] == seen["dt_bias"] == torch.float32
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(value.dtype == torch.float32 for state in optimizer.state.values() for value in state.values())
    assert all(state["step"] == 1 for state in optimizer.state.values())


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_model_trains(corpus: Path, tmp_path: Path, model_name: str, precision: str) -> None:
    settings = ("name=run", f"model={model_name}", f"train.precision={precision}", "train.steps=12")
    assert run_here(corpus, tmp_path, *settings) == 0
    losses = metrics(tmp_path, "run")
    assert losses[-1] < losses[0] - 0.1
    assert metrics(tmp_path, "run", "val_loss")[-1] < losses[0]
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_activation_checkpointing_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    for kind in ("none", "full"):
        assert (
            run_here(corpus, tmp_path, f"name={kind}", "train.steps=4", f"train.activation_checkpointing={kind}") == 0
        )
    assert metrics(tmp_path, "none") == pytest.approx(metrics(tmp_path, "full"), rel=1e-6)


def test_boundary_switch(corpus: Path, tmp_path: Path) -> None:
    """Row C23: by default the next document's first token is a target; the switch leaves it out of loss and count."""
    data = TokenFile.open(corpus)
    for masked in (False, True):
        name = f"name={masked}"
        assert run_here(corpus, tmp_path, name, "train.steps=1", f"data.mask_boundaries={str(masked).lower()}") == 0
        model = EflaForCausalLM(tiny_config())
        initialise(model, 42)
        batch = TrainLoader(StreamSequences(data, 16, masked), 4, 4, seed=42).batch(0, 0)
        valid = (batch.targets != -100).sum()
        assert (valid < 64) == masked
        loss = model(input_ids=batch.input_ids, targets=batch.targets).loss / valid
        assert metrics(tmp_path, str(masked))[0] == pytest.approx(loss.item(), rel=1e-5)


def test_non_finite_step_is_skipped(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row C16 on one rank: weights, moments and the number of steps stay as they were."""
    settings = ("name=run", "train.steps=6", "train.save_every=1")
    monkeypatch.setattr(trainer, "train_step", not_finite_at(2, 4))
    assert run_here(corpus, tmp_path, *settings) == 0
    at = {n: read_tensors(tmp_path / "run" / "checkpoints" / f"step-{n}") for n in range(1, 7)}
    assert_same_weights(at[2], at[3])
    assert_same_weights(at[4], at[5])
    assert not torch.equal(at[3]["model.lm_head.weight"], at[4]["model.lm_head.weight"])
    assert at[6]["optim.lm_head.weight.step"] == 4
    assert metrics(tmp_path, "run", "skipped_steps") == [0, 0, 1, 1, 2, 2]
    assert metrics(tmp_path, "run")[2] is None  # NaN is no JSON
    monkeypatch.setattr(trainer, "train_step", train_step)
    assert run_here(corpus, tmp_path, "name=run", "train.steps=7") == 0
    assert metrics(tmp_path, "run", "skipped_steps")[-1] == 2  # kept over a resume


def test_gives_up_after_too_many(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(trainer, "train_step", not_finite_at(1, 3, 4, 5, 6, 7))
    settings = ("name=run", "train.steps=9", "train.save_every=2", "train.max_skipped_steps=3")
    assert run_here(corpus, tmp_path, *settings) == 1
    line = capsys.readouterr().err
    assert "3 steps in a row were not finite, the last one at step 6" in line
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-2", "step-4"]


def test_results_count_in_a_row() -> None:
    results = StepResults(max_skipped=2, skipped=5)
    for step, skipped in enumerate([1, 0, 1, 0]):
        results.add(step, torch.tensor([1.0, 1.0, skipped, 0.0], dtype=torch.float64))
    assert results.skipped == 7 and not results.stop
    results.add(4, torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    assert results.stop and results.settle().step == 4
    results.add(5, torch.tensor([float("inf"), 1.0, 1.0, 0.0], dtype=torch.float64))
    with pytest.raises(UserError, match="2 steps in a row"):
        results.add(6, torch.tensor([float("nan"), 1.0, 1.0, 0.0], dtype=torch.float64))


def loop(**fields) -> LoopSettings:
    defaults = {"tokens": None, "steps": 5, "batch_tokens": 1024, "micro_tokens": 1 << 30, "micro_batch": None}
    return LoopSettings(**{**defaults, **fields})


def test_budget() -> None:
    assert plan_batches(loop(), 64, 2) == BatchPlan(64, 1024, micro_batch=8, micro_steps=1, steps=5)
    assert plan_batches(loop(micro_tokens=200), 64, 2) == BatchPlan(64, 1024, 2, 4, 5)  # 3 would not divide 8
    assert plan_batches(loop(micro_tokens=10), 64, 1) == BatchPlan(64, 1024, 1, 16, 5)
    assert plan_batches(loop(micro_tokens=None, micro_batch=4), 64, 2) == BatchPlan(64, 1024, 4, 2, 5)
    assert plan_batches(loop(tokens=1025, steps=None), 64, 1).steps == 2
    assert plan_batches(loop(tokens=1025, steps=None), 64, 1).total_tokens == 2048


@pytest.mark.parametrize(
    ("fields", "world_size", "said"),
    [
        ({"batch_tokens": 1000}, 1, "multiple of data.context=64"),
        ({}, 3, "16 sequences of data.context=64, which 3 processes"),
        ({"micro_tokens": None, "micro_batch": 3}, 2, "train.micro_batch=3: each of 2 process"),
        ({"micro_tokens": None}, 1, "train.micro_batch and train.micro_tokens"),
        ({"steps": None}, 1, "one of train.steps and train.tokens"),
        ({"tokens": 5}, 1, "one of train.steps and train.tokens"),
        ({"steps": 0}, 1, "nothing to train"),
    ],
)
def test_budget_that_does_not_divide(fields: dict[str, int | None], world_size: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plan_batches(loop(**fields), 64, world_size)
