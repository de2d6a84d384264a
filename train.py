"""Train a language model: `main` assembles the trainer, `fit` runs the loop.

python train.py model=efla size=340m data=slimpajama
torchrun --nproc-per-node=8 train.py model=efla size=1b3 data=slimpajama parallel=fsdp
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from efla_lm.parallel.distributed import leaving_process_group
from efla_lm.parallel.signals import Agreement, Interruption
from efla_lm.run.directory import RunDirectory, open_run
from efla_lm.run.export import export_checkpoint
from efla_lm.run.log import RunLog
from efla_lm.run.metrics import read_rows
from efla_lm.run.output import lasting_output
from efla_lm.run.progress import banner
from efla_lm.run.resume import find_resume, keep_tokenizer
from efla_lm.settings import TrainSettings, entry
from efla_lm.training.meter import Meter
from efla_lm.training.profile import RunProfile
from efla_lm.training.trainer import Setup, Trainer, assemble, describe, set_up
from efla_lm.training.validate import Evaluate, Validation, is_due


@dataclass(frozen=True)
class Run:
    """One launch of a run: the trainer, where it writes, and where it begins."""

    settings: TrainSettings
    trainer: Trainer
    directory: RunDirectory
    evaluate: Evaluate | None
    resumed_from: Path | None
    first: int  # the step of that checkpoint, or 0

    def skipped_validation(self, validation: Validation) -> set[str]:
        """What the previous launch did not measure after the step that this one resumes from."""
        if self.resumed_from is None or not self.resumed_from.is_relative_to(self.directory.path):
            return set()
        path = self.directory.metrics
        rows = self.trainer.setup.world.on_main(lambda: read_rows(path) if path.exists() else [])
        return validation.skipped(self.first, rows)


@entry("train", TrainSettings)
def main(settings: TrainSettings) -> int:
    """Train a language model on token files; the same command with name=RUN continues a run."""
    with lasting_output(), Interruption() as interruption, leaving_process_group():
        setup = set_up(settings)
        world = setup.world
        named = Path(settings.runs_dir) / settings.name if settings.name else None
        find = partial(find_resume, named, settings.resume, setup.identity)
        world.on_main(lambda: find(locked=False))
        evaluate = live_evaluation(settings, setup)
        with open_run(settings, rank=world.rank, world_size=world.size, broadcast=world.broadcast) as directory:
            checkpoint = world.on_main(lambda: find(locked=True))
            world.on_main(lambda: keep_tokenizer(setup.corpus.first.tokenizer_dir, directory.path))
            with closing(assemble(settings, setup)) as trainer:
                first = trainer.load(checkpoint) if checkpoint else 0
                begin = f"step {first} from {checkpoint}" if checkpoint else f"new, seed {settings.seed}"
                banner("efla-lm", {**describe(trainer), "start": begin, "run": directory.path}, main=world.is_main)
                run = Run(settings, trainer, directory, evaluate, checkpoint, first)
                finished, saved = fit(run, interruption)
            if finished and saved is not None:
                world.on_main(lambda: export_checkpoint(saved, directory.export))
                if world.is_main:
                    print(f"finished: {directory.path} (checkpoints, metrics.jsonl, export)", flush=True)
    return 0


def fit(run: Run, interruption: Interruption) -> tuple[bool, Path | None]:
    """Train from the step that the run has reached. Returns whether the run is finished, and its newest checkpoint.

    Stops early, after saving, if any rank is asked to stop or cannot write its rows, and at train.stop_at. The
    checkpoint of a step is written before its validation. A rank that is asked to stop has little time: a running
    validation is abandoned, none begins, and the next launch makes up for it.
    """
    settings, trainer, setup, results = run.settings, run.trainer, run.trainer.setup, run.trainer.results
    train, plan, world, folder = settings.train, setup.plan, setup.world, run.directory.path
    done = saved_step = run.first
    saved, last = run.resumed_from, min(plan.steps, train.stop_at or plan.steps)
    meter = Meter(setup.flops_per_token, world.device, world.size)
    profile = RunProfile(settings.profile, folder, world)
    max_sequences = train.validate_batches and train.validate_batches * plan.sequences
    validation = Validation(
        world, plan.steps, setup.heldout, train.validate_every, max_sequences, run.evaluate, settings.eval.every,
        Agreement(interruption, world),
    )  # fmt: skip
    with RunLog(run.directory, settings, world, plan.steps, done, interruption.fail) as log:
        with meter.paused():
            stopping = not validation.run(trainer.model, done, run.skipped_validation(validation), log.measured)
        for step in range(done, done if stopping else last):
            lr = trainer.set_learning_rate(step)
            batches = setup.batches(step)
            log.batches(step, batches)
            trainer.step(step, batches, stop=interruption.requested)  # forward-backward, clip, agree, step
            done = step + 1
            meter.count(plan.batch_tokens, wait=results.settle)

            due, saving = validation.due(done), is_due(done, train.save_every) or done == last
            if due or saving:
                results.settle()
            if done in (1, last) or results.stop or is_due(done, train.log_every):
                row = trainer.row(results.settle(), lr) | meter.read() | {"skipped_steps": results.skipped}
                log.row(row, meter.rate)
            elif results.last is not None:
                log.step(done, results.last.loss, lr, meter.rate)
            stopping = results.stop

            with meter.paused():
                if table := profile.after_step():
                    log.message(table)
                if saving or stopping:
                    saved, saved_step = trainer.save(folder, done, train.keep_checkpoints, saved_step), done
                stopping = stopping or not validation.run(trainer.model, done, due, log.measured)
                if stopping and saved_step < done:
                    saved = trainer.save(folder, done, train.keep_checkpoints, saved_step)
            if stopping:
                break
        if too_short := profile.close():
            log.message(too_short)
        finished = done >= plan.steps and not stopping
        if not finished:
            reason = f" on {interruption.reason}" if interruption.reason else ""
            hint = f"the same command with name={run.directory.name} continues the run"
            log.message(f"stopped{reason} after step {done} of {plan.steps}: {saved} is saved; {hint}")
    world.on_main(interruption.raise_failure)
    return finished, saved


def live_evaluation(settings: TrainSettings, setup: Setup) -> Evaluate | None:
    """The tasks that are evaluated during training, or None without eval.every. Raises UserError for a missing task."""
    if settings.eval.every is None:
        return None
    from efla_lm.evaluation.live import LiveEvaluation  # lm-eval takes seconds to import

    plan, tokenizer = setup.plan, setup.corpus.first.tokenizer_dir
    micro_tokens, data_dir = plan.micro_batch * plan.context, Path(settings.data.dir)
    return LiveEvaluation(setup.world, settings.eval, tokenizer, data_dir, plan.context, micro_tokens).run


if __name__ == "__main__":
    main()
