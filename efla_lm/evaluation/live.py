"""Tasks on the model of a training run, in the middle of it: `eval.every`, `eval.tasks`.

The run is not disturbed: no weight, moment or random stream changes, the model goes back to training mode, and graphs
that were compiled for training are neither used nor touched. All ranks take part, since the weights are sharded over
them: they make equally many forward passes, of no more tokens than a micro-batch of training, and share the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer

from efla_lm.errors import UserError
from efla_lm.evaluation import heldout
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.results import rows
from efla_lm.evaluation.runner import load_tasks, run_tasks
from efla_lm.evaluation.scoring import Scorer
from efla_lm.evaluation.tasks import describe_missing
from efla_lm.evaluation.tokens import TokenPolicy
from efla_lm.models import EflaForCausalLM
from efla_lm.parallel.distributed import World, reshard
from efla_lm.settings import LiveEvalSettings


class LiveEvaluation:
    """Evaluates a model in training each time `run` is called, by all ranks together.

    Args:
        tokenizer_dir: the tokenizer of the token files, which says itself whether a text opens with BOS.
        token_dir: the token files; their held-out text is `heldout`.
        context, micro_tokens: positions of a training window and of a micro-batch.

    Raises:
        UserError: a task that cannot be had, before training starts rather than in the middle of it.
    """

    def __init__(
        self,
        world: World,
        settings: LiveEvalSettings,
        tokenizer_dir: Path,
        token_dir: Path,
        context: int,
        micro_tokens: int,
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir, local_files_only=True)
        self._policy, self._world, self._limit = TokenPolicy(tokenizer), world, settings.limit
        self._context, self._micro_tokens = context, micro_tokens
        self._task_sets, missing = load_tasks(
            settings.tasks,
            tokenizer,
            Path(settings.local_dir) if settings.local_dir else None,
            token_dir if heldout.NAME in settings.tasks else None,
            keys=("eval.tasks", "eval.local_dir"),
        )
        if missing:
            raise UserError(f"eval.tasks: {'; '.join(describe_missing(missing))}")

    def run(self, model: EflaForCausalLM, check: Callable[[], None] = lambda: None) -> dict[str, float]:
        """`eval/TASK/METRIC` of all tasks, on every rank.

        model: the (sharded) model that is being trained. check: called before each forward pass that scores, equally
        often on all ranks; what it raises ends the evaluation.
        """
        scorer = Scorer(model, self._context, "auto", self._world, lockstep_tokens=self._micro_tokens, check=check)
        try:
            with torch.compiler.set_stance("force_eager"):
                found = run_tasks(HarnessLM(scorer, self._policy), self._task_sets, limit=self._limit, bootstrap=0)
        finally:
            reshard(model)  # a forward pass without a backward one leaves the weights gathered
        return {f"eval/{task}/{metric}": value for task, metric, value, _, _ in rows(found)}
