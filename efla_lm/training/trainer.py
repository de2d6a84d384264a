"""The trainer: everything that a training step needs, assembled once from the settings.

    setup = set_up(settings)                  processes, batches, data, config: quick, writes nothing, refuses mistakes
    trainer = assemble(settings, setup)       model and optimiser
    trainer.set_learning_rate(step)
    trainer.step(step, setup.batches(step))

`train.py` and `scripts.throughput` use it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from efla_data.loader.batches import Batch, TrainLoader, ValidationLoader
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from efla_lm.models import EflaConfig, EflaForCausalLM, flops_per_token
from efla_lm.parallel.cuda_graphs import ForwardBackward, GraphedForwardBackward, eager_forward_backward, release
from efla_lm.parallel.distributed import World, build_mesh, start
from efla_lm.run.checkpoint import load_checkpoint
from efla_lm.run.meta import CheckpointMeta
from efla_lm.run.resume import run_identity
from efla_lm.run.save import save_checkpoint
from efla_lm.settings import ScheduleSettings, TrainSettings
from efla_lm.training import schedule
from efla_lm.training.batch_plan import BatchPlan, plan_batches
from efla_lm.training.data import Corpus, build_loaders, data_identity, describe_packing, open_corpus
from efla_lm.training.model import Execution, build_config, build_model, plan_execution
from efla_lm.training.optim import build_optimizer, set_learning_rate
from efla_lm.training.step import StepResult, StepResults, train_step


@dataclass(frozen=True)
class Setup:
    """The parts of a run that come before its weights. They serve any model that is trained on these batches."""

    world: World
    mesh: DeviceMesh
    plan: BatchPlan
    corpus: Corpus
    config: EflaConfig
    execution: Execution
    loader: TrainLoader
    heldout: ValidationLoader | None
    schedule: ScheduleSettings
    identity: dict[str, Any]  # what a resumed run must share with its checkpoint

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the forward and backward pass per position."""
        return flops_per_token(self.config, self.plan.context)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of this rank in step `step` (from 0)."""
        return [self.loader.batch(step, micro) for micro in range(self.plan.micro_steps)]

    def set_learning_rate(self, optimizer: Optimizer, step: int) -> float:
        """Set and return the learning rate of step `step` (from 0)."""
        plan = self.plan
        lr = schedule.learning_rate(self.schedule, step * plan.batch_tokens, plan.total_tokens, plan.batch_tokens)
        set_learning_rate(optimizer, lr)
        return lr


def set_up(settings: TrainSettings) -> Setup:
    """Join the processes, plan the batches, open the data. Raises UserError or DataError for settings that do not fit
    together; nothing is written."""
    train, parallel, data = settings.train, settings.parallel, settings.data
    world = start(train.device, parallel.world_size)
    plan = plan_batches(train, data.context, world.size)
    mesh = build_mesh(world, parallel.mode, parallel.replicate, parallel.shard)
    corpus = open_corpus(data, world)
    config = build_config(settings.model, corpus.first)
    execution = plan_execution(train, parallel, data.packing, config, world)
    loader, heldout = build_loaders(data, plan, corpus, world, settings.seed)
    identity = run_identity(
        settings.model, config, data_identity(data, loader.sequences), train.batch_tokens, settings.seed
    )
    return Setup(world, mesh, plan, corpus, config, execution, loader, heldout, settings.schedule, identity)


@dataclass(frozen=True)
class Trainer:
    """A model in training: `step` takes one optimiser step on a global batch."""

    setup: Setup
    model: EflaForCausalLM
    optimizer: AdamW
    forward_backward: ForwardBackward
    clip_norm: float | None
    results: StepResults

    def set_learning_rate(self, step: int) -> float:
        """See `Setup.set_learning_rate`."""
        return self.setup.set_learning_rate(self.optimizer, step)

    def step(self, step: int, batches: list[Batch], stop: bool = False) -> None:
        """Train on the batches of step `step` (from 0); its result comes to `results`. stop: see `train_step`."""
        result = train_step(
            self.model, self.optimizer, batches, self.setup.world, replicas=self.setup.mesh["replicate"].size(),
            clip_norm=self.clip_norm, stop=stop, forward_backward=self.forward_backward,
        )  # fmt: skip
        self.results.add(step + 1, result)

    def row(self, result: StepResult, lr: float) -> dict[str, int | float | None]:
        """The figures of a step for metrics.jsonl. clip_scale: the factor that clipping applied to the gradient, 1
        for none."""
        clip, norm = self.clip_norm, result.grad_norm
        scale = 1.0 if clip is None or norm <= clip else clip / norm
        return {
            "step": result.step,
            "tokens": result.step * self.setup.plan.batch_tokens,
            "loss": result.loss,
            "lr": lr,
            "grad_norm": norm,
            "clip_scale": None if result.skipped else scale,
        }

    def load(self, step_dir: Path) -> int:
        """Read a checkpoint into the model and the optimiser; all ranks call it. Returns its step."""
        meta = load_checkpoint(step_dir, self.model, self.optimizer, self.setup.world)
        self.results.skipped = meta.skipped_steps
        return meta.step

    def save(self, run_dir: Path, step: int, keep: int | None, previous: int) -> Path:
        """Write the checkpoint of `step` and return its folder; all ranks call it. keep: how many stay; None: all.

        previous: the step of the last checkpoint. If every step since was skipped, all older checkpoints stay: the last
        good one must not go while a run is not finite.
        """
        keep = keep if self.results.in_a_row < step - previous else None
        setup = self.setup
        meta = CheckpointMeta(step, step * setup.plan.batch_tokens, setup.identity, self.results.skipped)
        write_config = setup.config.save_pretrained
        return save_checkpoint(run_dir, self.model, self.optimizer, meta, setup.world, write_config, keep or 0)

    def close(self) -> None:
        """Free the CUDA graphs; call this before the process group ends."""
        release(self.forward_backward)


def assemble(settings: TrainSettings, setup: Setup) -> Trainer:
    """The trainer with initial weights."""
    model = build_model(setup.config, setup.execution, setup.world, setup.mesh, settings.seed)
    return Trainer(
        setup,
        model,
        build_optimizer(model, **asdict(settings.optim)),
        GraphedForwardBackward() if setup.execution.cuda_graphs else eager_forward_backward,
        settings.train.clip_norm,
        StepResults(settings.train.max_skipped_steps),
    )


def describe(trainer: Trainer) -> dict[str, str]:
    """The facts of a run for the banner."""
    setup, model = trainer.setup, trainer.model
    plan, config, execution, world, corpus = setup.plan, setup.config, setup.execution, setup.world, setup.corpus
    parameters = sum(p.numel() for p in model.parameters())
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    heldout = corpus.heldout.num_tokens if corpus.heldout else 0
    packing = describe_packing(setup.loader.sequences)
    replicas, shards = setup.mesh.shape
    cut = f"{world.size} rank(s) x {plan.micro_steps} micro x {plan.micro_batch}"
    return {
        "model": f"{config.mixer}, {parameters:,} parameters, {config.num_hidden_layers} blocks, "
        f"backend {execution.backend}",
        "data": f"{corpus.name}, {corpus.num_tokens:,} tokens, {heldout:,} held out",
        **({"packing": packing} if packing else {}),
        "training": f"{plan.steps:,} steps of {plan.batch_tokens:,} tokens = {plan.total_tokens:,} tokens",
        "batch": f"{plan.sequences} sequences of {plan.context}: {cut}",
        "devices": f"{world.size} x {device}, {execution.precision}, {replicas} replica(s) of {shards} shard(s)",
        "kernels": "replayed from CUDA graphs" if execution.cuda_graphs else "launched one by one",
        "schedule": schedule.describe(setup.schedule, plan.total_tokens, plan.batch_tokens),
    }
