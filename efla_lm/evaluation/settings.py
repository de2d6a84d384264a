"""Settings of `eval.py`: every key with its default and a line of help."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass, field

from efla_lm.errors import UserError
from efla_lm.settings.fields import MISSING, PATH, PATH_OR_HUB, key

CHECKPOINT = "run directory, its step-N or export folder, any model folder, or a hub name"


@dataclass
class TaskSettings:
    """What is evaluated (`tasks=paper|heldout|custom`)."""

    name: str = key("custom", "label of the set, part of the result file's name")
    names: list[str] = key([], "lm-eval tasks, groups or tags; `heldout` is the run's own held-out text")
    local_dir: str | None = key(None, "folder of local copies (see conf/tasks/paper.yaml); null: the hub", path=PATH)
    data_dir: str | None = key(None, "token files of the task heldout; null: those of the run", path=PATH)
    num_fewshot: int = key(0, "examples in the prompt [paper, section 3: zero-shot]")


@dataclass
class EvalSettings:
    """All of `eval.py`."""

    checkpoint: str = key(MISSING, CHECKPOINT, path=PATH_OR_HUB)
    tasks: TaskSettings = field(default_factory=TaskSettings)
    limit: int | None = key(None, "first documents of each task only; null: all (needed for numbers to report)")
    batch_size: str = key("auto", "rows per batch, or auto: what fits; the numbers are the same")
    dtype: str = key("fp32", "type of weights and activations; log-probabilities are fp32", choices=("fp32", "bf16"))
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    context: int | None = key(None, "most tokens given to the model at once; null: its training context")
    bos: str = key("auto", "texts open with BOS; auto: as the tokenizer does it", choices=("auto", "always", "never"))
    prefix: str = key("auto", "token before text without context; auto: BOS, else EOS", choices=("auto", "bos", "eos"))
    carry_state: bool = key(
        False, "also perplexities with the recurrent state carried over whole documents (METRIC_state_carried)"
    )
    seed: int = key(1234, "seed of few-shot examples and sampling")
    bootstrap: int = key(1000, "resamples behind standard errors that have no closed form; 0: none")
    out: str | None = key(None, "folder of the result file; null: RUN/results, or results/NAME", path=PATH)

    def check(self) -> None:
        """Raise UserError for values that no evaluation can mean."""
        least = {"limit": self.limit, "context": self.context}
        for name, value in least.items():
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected at least 1, or null")
        for name, value in {"bootstrap": self.bootstrap, "tasks.num_fewshot": self.tasks.num_fewshot}.items():
            if value < 0:
                raise UserError(f"{name}={value}: expected 0 or more")
        check_seed(self.seed)
        if not self.tasks.names:
            raise UserError("tasks.names is empty: choose tasks=paper or tasks=heldout, or list lm-eval tasks")
        if self.tasks.local_dir and self.tasks.num_fewshot:
            raise UserError("tasks.num_fewshot needs the hub: local copies hold the evaluated split only")

    @property
    def rows(self) -> int | str:
        """`batch_size` as a number where it is one."""
        return int(self.batch_size) if self.batch_size.isdecimal() else self.batch_size


def check_seed(seed: int) -> None:
    """Raise UserError for a seed that torch or numpy refuses."""
    if not 0 <= seed < 1 << 32:
        raise UserError(f"seed={seed}: expected 0 or more, below 2^32")
