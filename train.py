"""Train a language model: `main` builds the parts, `fit` runs the loop.

python train.py model=efla size=340m data=slimpajama
torchrun --nproc-per-node=8 train.py model=efla size=1b3 data=slimpajama parallel=fsdp
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from efla_data.loader.batches import TrainLoader, ValidationLoader
from torch.optim import AdamW

from efla_lm.models import EflaConfig, EflaForCausalLM, flops_per_token
from efla_lm.parallel.cuda_graphs import GraphedPasses, release
from efla_lm.parallel.distributed import World, build_mesh, finish, start
from efla_lm.parallel.signals import Agreement, Interruption, StopAsked
from efla_lm.run.batch_log import BatchLog
from efla_lm.run.checkpoint import load_checkpoint
from efla_lm.run.directory import RunDirectory, open_run
from efla_lm.run.export import export_checkpoint
from efla_lm.run.meta import CheckpointMeta
from efla_lm.run.metrics import MetricsWriter, read_rows
from efla_lm.run.output import lasting_output
from efla_lm.run.progress import Progress, banner
from efla_lm.run.save import save_checkpoint
from efla_lm.settings import TrainSettings, entry, to_dict
from efla_lm.training import build, corpus, schedule
from efla_lm.training.batch_plan import Budget, plan_budget
from efla_lm.training.meter import Meter
from efla_lm.training.optim import build_optimizer, set_learning_rate
from efla_lm.training.profile import RunProfile
from efla_lm.training.step import Passes, Verdicts, update
from efla_lm.training.validate import validate

if TYPE_CHECKING:
    from efla_lm.evaluation.live import LiveEvaluation


@dataclass
class Run:
    """The parts of one launch."""

    settings: TrainSettings
    world: World
    budget: Budget
    directory: RunDirectory
    config: EflaConfig
    model: EflaForCausalLM
    optimizer: AdamW
    replicas: int  # ranks that hold the same shard
    passes: Passes
    train_data: TrainLoader
    heldout_data: ValidationLoader | None
    data: corpus.Corpus
    identity: dict[str, object]
    resumed_from: Path | None
    start: CheckpointMeta  # where this launch begins
    evaluation: LiveEvaluation | None  # eval.every
    interruption: Interruption

    def record(self, row: dict[str, Any], metrics: MetricsWriter) -> None:
        """Write a row of metrics. A failed write asks the run to stop: it saves first, then raises the error."""
        try:
            metrics.write(row)
        except OSError as error:
            self.interruption.fail(error)

    def save(self, step: int, verdicts: Verdicts, kept: int) -> Path:
        """Write the checkpoint of `step`; all ranks call it. kept: the step of the checkpoint before.

        Where every update since was skipped, no older checkpoint is removed: they are of a healthier time.
        """
        meta = CheckpointMeta(step, step * self.budget.batch_tokens, self.identity, verdicts.skipped)
        keep = (self.settings.train.keep_checkpoints or 0) if verdicts.in_a_row < step - kept else 0
        write_config = self.config.save_pretrained
        return save_checkpoint(self.directory.path, self.model, self.optimizer, meta, self.world, write_config, keep)

    def due(self, step: int) -> set[str]:
        """What is done after update `step`, by the name of its rows in metrics.jsonl: `val_loss`, `eval`."""
        every = {
            "val_loss": (self.heldout_data is not None, self.settings.train.validate_every),
            "eval": (self.evaluation is not None, self.settings.eval.every),
        }
        last = step == self.budget.steps
        return {name for name, (wanted, often) in every.items() if wanted and (last or is_due(step, often))}

    def owed(self) -> set[str]:
        """What of `due` an earlier launch of this run left out after the update where this one begins."""
        if self.resumed_from is None or not self.resumed_from.is_relative_to(self.directory.path):
            return set()
        step, path = self.start.step, self.directory.metrics
        rows = self.world.on_main(lambda: read_rows(path) if path.exists() else [])
        return self.due(step) - {name.partition("/")[0] for row in rows if row["step"] == step for name in row}

    def assess(
        self, step: int, due: set[str], metrics: MetricsWriter, progress: Progress, agreement: Agreement
    ) -> bool:
        """Validate and evaluate as `due` says after update `step`. False: a rank was asked to stop meanwhile."""
        try:
            if "val_loss" in due and self.heldout_data is not None:
                batches = self.settings.train.validate_batches
                windows = batches and batches * self.budget.windows
                val_loss = validate(self.model, self.heldout_data, self.world, windows, agreement.check)
                self.record({"step": step, "val_loss": val_loss}, metrics)
                progress.validated(step, val_loss)
            if "eval" in due and self.evaluation is not None:
                scores = self.evaluation.run(self.model, agreement.check)
                self.record({"step": step, **scores}, metrics)
                progress.evaluated(step, scores)
            if due:
                agreement.settle()
        except StopAsked:
            return False
        return True


@entry("train", TrainSettings)
def main(settings: TrainSettings) -> int:
    """Train a language model on token files; the same command with name=RUN continues a run."""
    with lasting_output(), Interruption() as interruption:
        world = start(settings.train.device, settings.parallel.world_size)
        budget = plan_budget(settings.train, settings.data.context, world.size)
        mesh = build_mesh(world, settings.parallel.mode, settings.parallel.replicate, settings.parallel.shard)
        data = corpus.open_corpus(settings.data, world)
        tokens = data.first
        config = build.build_config(settings, tokens)
        backend, passes = build.backend_in_use(config, world.device), build.build_passes(settings, world)
        train_data, heldout_data = corpus.build_loaders(settings, budget, data, world)
        identity = build.identity(settings, config, train_data.sequences)
        world.on_main(lambda: build.find_resume(settings, identity, locked=False))
        evaluation = build.live_evaluation(settings, tokens, budget, world)
        with open_run(settings, rank=world.rank, world_size=world.size, broadcast=world.broadcast) as directory:
            resume = world.on_main(lambda: build.find_resume(settings, identity, locked=True))
            world.on_main(lambda: build.keep_tokenizer(tokens, directory.path))
            model = build.build_model(settings, config, world, mesh)
            optimizer = build_optimizer(model, **asdict(settings.optim))
            begin = load_checkpoint(resume, model, optimizer, world) if resume else CheckpointMeta(0, 0, identity)
            replicas = mesh["replicate"].size()
            run = Run(
                settings, world, budget, directory, config, model, optimizer, replicas, passes, train_data,
                heldout_data, data, identity, resume, begin, evaluation, interruption,
            )  # fmt: skip
            banner("efla-lm", facts(run, backend), main=world.is_main)
            try:
                finished, saved = fit(run, interruption)
            finally:
                release(passes)
            if finished and saved is not None:
                world.on_main(lambda: export_checkpoint(saved, directory.export))
                if world.is_main:
                    print(f"finished: {directory.path} (checkpoints, metrics.jsonl, export)", flush=True)
        finish()
    return 0


def fit(run: Run, interruption: Interruption) -> tuple[bool, Path | None]:
    """Train from the update that the run has come to. Returns whether all is done, and the newest checkpoint.

    Leaves early, after saving, when any rank is asked to stop or at train.stop_at. An update's checkpoint is written
    before its validation. Whoever is asked to stop has little time: no validation begins then, and one that is under
    way is left; the next launch makes up for it.
    """
    settings, budget, train = run.settings, run.budget, run.settings.train
    last = min(budget.steps, train.stop_at or budget.steps)
    saved, done, kept = run.resumed_from, run.start.step, run.start.step  # kept: the update that `saved` is of
    verdicts = Verdicts(train.max_skipped_steps, run.start.skipped_steps)
    batch_log = BatchLog(run.directory.path / "batches.jsonl", run.world, done) if train.log_batches else None
    meter = Meter(flops_per_token(run.config, budget.context), run.world.device, run.world.size)
    traced = RunProfile(settings.profile, run.directory.path, run.world)
    agreement = Agreement(interruption, run.world)
    with (
        MetricsWriter(run.directory, settings.logger, resumed_step=done, config=to_dict(settings)) as metrics,
        Progress(budget.steps, start_step=done, main=run.world.is_main) as progress,
    ):
        with meter.paused():
            asked = not run.assess(done, run.owed(), metrics, progress, agreement)
        for step in range(done, done if asked else last):
            tokens = step * budget.batch_tokens
            lr = schedule.learning_rate(settings.schedule, tokens, budget.total_tokens, budget.batch_tokens)
            set_learning_rate(run.optimizer, lr)
            batches = [run.train_data.batch(step, micro) for micro in range(budget.micro_steps)]
            if batch_log is not None:
                batch_log.write(step, batches)
            verdict = update(
                run.model, run.optimizer, batches, run.world,
                replicas=run.replicas, clip_norm=train.clip_norm, stop=interruption.requested, passes=run.passes,
            )  # fmt: skip
            done = step + 1
            verdicts.add(done, verdict)
            meter.count(budget.batch_tokens)

            due, saving = run.due(done), is_due(done, train.save_every)
            if due or saving or done == last:
                verdicts.settle()
            if done == 1 or done == last or verdicts.stop or is_due(done, train.log_every):
                seen, speed = verdicts.settle(), meter.read()
                row = {"step": done, "tokens": done * budget.batch_tokens, "loss": seen.loss, "lr": lr}
                run.record(row | {"grad_norm": seen.grad_norm} | speed | {"skipped_steps": verdicts.skipped}, metrics)
                progress.update(done, loss=seen.loss, lr=lr, tokens_per_second=meter.rate)
            elif verdicts.last is not None:
                progress.update(done, loss=verdicts.last.loss, lr=lr, tokens_per_second=meter.rate, log=False)
            asked = verdicts.stop

            with meter.paused():
                if table := traced.after_update():
                    progress.message(table)
                if saving or asked or done == last:
                    saved, kept = run.save(done, verdicts, kept), done
                asked = asked or not run.assess(done, due, metrics, progress, agreement)
                if asked and kept < done:
                    saved = run.save(done, verdicts, kept)
            if asked:
                break
        if too_short := traced.close():
            progress.message(too_short)
        finished = done >= budget.steps and not asked
        if not finished:
            why = f" on {interruption.reason}" if interruption.reason else ""
            hint = f"the same command with name={run.directory.name} goes on"
            progress.message(f"stopped{why} after update {done} of {budget.steps}: {saved} is saved; {hint}")
    if interruption.error is not None:
        raise interruption.error
    return finished, saved


def is_due(done: int, every: int | None) -> bool:
    """Whether something is done after this update; null: never."""
    return every is not None and done % every == 0


def facts(run: Run, backend: str) -> dict[str, object]:
    """What the banner says."""
    s, b, config, world = run.settings, run.budget, run.config, run.world
    parameters = sum(p.numel() for p in run.model.parameters())
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    heldout = run.data.heldout.num_tokens if run.data.heldout else 0
    packing = corpus.describe(run.train_data.sequences)
    shards = world.size // run.replicas
    return {
        "model": f"{config.mixer}, {parameters:,} parameters, {config.num_hidden_layers} blocks, backend {backend}",
        "data": f"{s.data.name}, {run.data.num_tokens:,} tokens, {heldout:,} held out",
        **({"packing": packing} if packing else {}),
        "training": f"{b.steps:,} updates of {b.batch_tokens:,} tokens = {b.total_tokens:,} tokens",
        "batch": f"{b.windows} windows of {b.context}: {world.size} rank(s) x {b.micro_steps} micro x {b.micro_batch}",
        "devices": f"{world.size} x {device}, {s.train.precision}, {run.replicas} replica(s) of {shards} shard(s)",
        "passes": "replayed from CUDA graphs" if isinstance(run.passes, GraphedPasses) else "launched one by one",
        "schedule": schedule.describe(s.schedule, b.total_tokens, b.batch_tokens),
        "start": f"update {run.start.step} from {run.resumed_from}" if run.resumed_from else f"new, seed {s.seed}",
        "run": run.directory.path,
    }


if __name__ == "__main__":
    main()
