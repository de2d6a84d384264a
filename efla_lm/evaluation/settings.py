"""Settings of `eval.py` and of scripts generate, table1, eval_compare, eval_speed: keys, defaults, lines of help."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass, field

from efla_lm.errors import UserError
from efla_lm.evaluation.columns import PAPER_TASKS
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
        _check_seed(self.seed)
        if not self.tasks.names:
            raise UserError("tasks.names is empty: choose tasks=paper or tasks=heldout, or list lm-eval tasks")
        if self.tasks.local_dir and self.tasks.num_fewshot:
            raise UserError("tasks.num_fewshot needs the hub: local copies hold the evaluated split only")

    @property
    def rows(self) -> int | str:
        """`batch_size` as a number where it is one."""
        return int(self.batch_size) if self.batch_size.isdecimal() else self.batch_size


@dataclass
class Table1Settings:
    """All of `python -m scripts.table1`."""

    runs: list[str] = key([], "run directories, folders of result files, or result files", path=PATH)
    out: str = key("results/table1", "folder of table1.md, table1.csv and table1.tex", path=PATH)


@dataclass
class EvalCompareSettings:
    """All of `python -m scripts.eval_compare`."""

    checkpoint: str = key(MISSING, "export or model folder, or a hub name", path=PATH_OR_HUB)
    local_dir: str | None = key(None, "folder of local copies of the tasks; null: the hub", path=PATH)
    limit: int | None = key(None, "first documents of each task only; null: all")
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    stock_batch_size: int = key(64, "rows per batch of the stock model (its own default is 1)")
    out: str = key("results/eval_compare.json", "result file", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that nothing can be compared with. Called once by `entry`."""
        for name in ("limit", "stock_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected at least 1")


@dataclass
class EvalSpeedSettings:
    """All of `python -m scripts.eval_speed`."""

    local_dir: str | None = key(None, "folder of local copies of the tasks; null: the hub", path=PATH)
    tokenizer: str = key(MISSING, "folder or hub name of the tokenizer", path=PATH_OR_HUB)
    size: str = key("340m", "size of the models (conf/size)")
    dtype: str = key("bf16", "type of weights and activations", choices=("fp32", "bf16"))
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    full: bool = key(True, "time eval.py on the ten tasks")
    full_limit: int | None = key(None, "first documents of each task that `full` takes; null: all")
    gpus: int = key(1, "more than one: time eval.py on so many processes too, a GPU each, beside one: speed, numbers")
    stock: bool = key(True, "time lm-eval's stock model over fla's DeltaNet beside ours (needs a GPU and fla)")
    tasks: list[str] = key([*PAPER_TASKS], "tasks of the comparison; `full` takes all ten")
    limit: int | None = key(None, "first documents of each task that the comparison takes; null: all")
    warm: bool = key(True, "the comparison runs each task twice and counts the second; false: once, with compilation")
    stock_batch_size: int = key(64, "rows per batch of the stock model (its own default is 1)")
    out: str = key("results/eval_speed.json", "result file", path=PATH)

    def validate(self) -> None:
        """Raise UserError for values that nothing can be measured with. Called once by `entry`."""
        for name in ("full_limit", "gpus", "limit", "stock_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected at least 1")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise UserError(f"tasks={self.tasks}: expected at least one task to compare, each once")
        if not self.full and (self.gpus > 1 or self.full_limit is not None):
            raise UserError("full=false: gpus and full_limit say how eval.py is timed; set full=true or leave them out")


@dataclass
class GenerateSettings:
    """All of `python -m scripts.generate`."""

    checkpoint: str = key(MISSING, CHECKPOINT, path=PATH_OR_HUB)
    prompt: str = key(MISSING, "text to continue")
    max_new_tokens: int = key(100, "most tokens to add; EOS ends earlier")
    temperature: float = key(0.0, "0: the most probable token each time; above: sampling")
    top_p: float = key(1.0, "sample from the smallest set of tokens with this probability")
    top_k: int | None = key(None, "sample from this many tokens; null: all")
    seed: int = key(42, "seed of sampling")
    dtype: str = key("fp32", "type of weights and activations", choices=("fp32", "bf16"))
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    bos: str = key("auto", "prompt opens with BOS; auto: as the tokenizer does it", choices=("auto", "always", "never"))

    def validate(self) -> None:
        """Raise UserError for values that no generation can mean. Called once by `entry`, before a model is loaded."""
        _check_seed(self.seed)
        if self.temperature == 0 and (self.top_k is not None or 0 < self.top_p < 1):
            given = f"top_p={self.top_p}" if self.top_k is None else f"top_k={self.top_k}"
            raise UserError(
                f"{given} says what is sampled from, but temperature=0 takes the most probable token each time: set "
                "temperature, e.g. 0.8, or leave it out"
            )
        if any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise UserError("prompt: expected text, got bytes that are not UTF-8; set the terminal's encoding to UTF-8")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 1 << 32:
        raise UserError(f"seed={seed}: expected 0 or more, below 2^32")
