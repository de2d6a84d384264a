"""Tasks on a model in training (`eval.every`, `eval.tasks`).

Evaluation changes nothing of the run: weights, optimiser state, random streams, training mode and compiled graphs stay
as they are. All ranks take part because the weights are sharded over them. They make equally many forward passes, of at
most as many tokens as a micro-batch, and share the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from efla_lm.errors import UserError
from efla_lm.evaluation import heldout
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.results import rows
from efla_lm.evaluation.runner import load_tasks, run_tasks
from efla_lm.evaluation.scoring import Scorer
from efla_lm.evaluation.tasks import describe_missing
from efla_lm.evaluation.tokens import TokenPolicy
from efla_lm.models import EflaForCausalLM
from efla_lm.models.pretrained import load_tokenizer
from efla_lm.parallel.distributed import World, reshard
from efla_lm.settings import LiveEvalSettings


class LiveEvaluation:
    """Evaluates a model in training each time `run` is called, by all ranks together.

    Args:
        tokenizer_dir: the tokenizer of the token files; it says whether a text opens with BOS.
        token_dir: the token files; the task `heldout` reads their held-out text.
        context, micro_tokens: positions of a training sequence and of a micro-batch.

    Raises:
        UserError: a task cannot be loaded. The constructor loads all, so this happens before training starts.
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
        tokenizer = load_tokenizer(tokenizer_dir)
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

        model: the model in training, sharded or not. check: called before each scoring pass, equally often on all
        ranks; an exception that it raises ends the evaluation.
        """
        scorer = Scorer(model, self._context, "auto", self._world, lockstep_tokens=self._micro_tokens, check=check)
        try:
            with torch.compiler.set_stance("force_eager"):
                found = run_tasks(HarnessLM(scorer, self._policy), self._task_sets, limit=self._limit, bootstrap=0)
        finally:
            reshard(model)  # a forward pass without a backward pass leaves the weights gathered
        return {f"eval/{task}/{metric}": value for task, metric, value, _, _ in rows(found)}
