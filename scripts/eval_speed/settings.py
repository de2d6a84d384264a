"""Settings of `python -m scripts.eval_speed`: every key with its default and a line of help."""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass

from efla_lm.errors import UserError
from efla_lm.evaluation.results import PAPER_TASKS
from efla_lm.settings.fields import MISSING, PATH, PATH_OR_HUB, key


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
