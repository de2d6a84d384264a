"""Every setting of training, typed, with its default, a line of help and the checks of its values.

The dataclasses own the defaults; a YAML file under `conf/` holds only what differs from them. A token is a position, an
update is one optimiser step. [paper] marks values of arXiv 2512.12602v4, table of language-model settings, that are the
same for every size; `conf/size/` has those of a size. `validate` of each class raises UserError; it changes nothing.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass, field

from efla_data.fields import MISSING, PATH, PathRule, key

from efla_lm.errors import UserError
from efla_lm.models.rules import RULES
from efla_lm.settings.data import DataSettings
from efla_lm.settings.expect import exactly_one, positive


@dataclass
class SizeSettings:
    """One size (`size=NAME`): the widths of every family at that size, and the budget it is trained with.

    A model file takes what its family needs (`conf/model/*.yaml`), so that `model` and `size` are chosen separately.
    """

    name: str = key("tiny", "part of the name of a new run directory")
    hidden_size: int = key(128, "width of the residual stream")
    num_heads: int = key(2, "heads of the mixer")
    head_dim: int = key(64, "key and value width of one head")
    layers: int = key(4, "blocks of a model whose block holds a SwiGLU")
    layers_without_mlp: int = key(8, "blocks of a model whose block is the mixer alone (Mamba-2)")
    mlp: int = key(384, "SwiGLU width beside a mixer without output gate")
    mlp_gated: int = key(344, "SwiGLU width beside a mixer with output gate, which holds parameters of its own")
    tokens: int = key(300 * 8192, "default of train.tokens")
    batch_tokens: int = key(8192, "default of train.batch_tokens")
    micro_tokens: int = key(8192, "default of train.micro_tokens")
    warmup_updates: int = key(30, "default of schedule.warmup_updates")
    precision: str = key("fp32", "default of train.precision", choices=("fp32", "bf16"))


@dataclass
class ModelSettings:
    """The model, field by field as `EflaConfig` takes them."""

    mixer: str = key("efla", "sequence mixer", choices=tuple(RULES))
    vocab_size: int | None = key(None, "rows of the embedding; null: the vocabulary of the token files' tokenizer")
    hidden_size: int = key("${size.hidden_size}", "width of the residual stream")
    num_hidden_layers: int = key("${size.layers}", "blocks")
    num_heads: int = key("${size.num_heads}", "heads (Mamba-2 has expand * hidden_size / mamba_head_dim instead)")
    head_dim: int = key("${size.head_dim}", "key and value width of one head")
    mlp: bool = key(True, "whether each block holds a SwiGLU after the mixer")
    intermediate_size: int = key("${size.mlp}", "SwiGLU width")
    conv_size: int = key(4, "kernel of the short convolutions [paper]")
    output_gate: bool | None = key(None, "output gate of the mixer; null: as the family has it")
    norm_eps: float = key(1e-6, "added to the mean square in RMSNorm")
    rope_theta: float = key(10000.0, "rotary base (attention only)")
    expand: int = key(2, "inner width / hidden_size (Mamba-2 only)")
    state_size: int = key(128, "state rows N (Mamba-2 only)")
    mamba_head_dim: int = key(64, "head width P (Mamba-2 only)")
    num_groups: int = key(1, "groups that share B and C (Mamba-2 only)")
    tie_word_embeddings: bool = key(False, "share the embedding with the output projection")
    initializer_range: float = key(0.02, "standard deviation of the initial matrices")
    max_position_embeddings: int = key("${data.context}", "training context, kept in the exported config")
    backend: str = key(
        "auto",
        "implementation of the mixer's op; triton_recompute keeps no chunk states for the backward pass",
        choices=("auto", "torch", "reference", "triton", "triton_recompute", "fla"),
    )


@dataclass
class LoopSettings:
    """The training loop. A token is a position; a global batch is what one update sees over all devices."""

    tokens: int | None = key(
        "${size.tokens}",
        "length of training, rounded up to whole updates",
        instead_of="steps",
        also_called=("epochs", "num_epochs", "num_train_epochs", "max_epochs", "total_tokens"),
    )
    steps: int | None = key(
        None,
        "length of training in updates",
        instead_of="tokens",
        also_called=("max_steps", "num_steps", "total_steps", "max_iters", "iterations", "updates"),
    )
    batch_tokens: int = key(
        "${size.batch_tokens}",
        "tokens of a global batch, a multiple of data.context",
        also_called=("batch_size", "global_batch_size", "batch", "total_batch_size"),
    )
    micro_tokens: int | None = key(
        "${size.micro_tokens}",
        "most tokens a device takes at once; the largest even cut is used",
        instead_of="micro_batch",
    )
    micro_batch: int | None = key(
        None,
        "sequences a device takes at once",
        instead_of="micro_tokens",
        also_called=("micro_batch_size", "per_device_train_batch_size", "device_batch_size"),
    )
    precision: str = key(
        "${size.precision}",
        "compute type; weights and optimiser stay fp32",
        choices=("fp32", "bf16"),
        also_called=("dtype", "mixed_precision", "bf16"),
    )
    compile: bool | None = key(
        None, "compile the blocks (torch.compile); null: on a GPU, but not packed documents by the torch backend"
    )
    activation_checkpointing: str = key(
        "auto",
        "selective: the backward pass recomputes all but matmuls and mixer ops; products: mixer ops too; full: "
        "whole blocks; auto: selective in compiled blocks, else none",
        choices=("auto", "none", "selective", "products", "full"),
    )
    cuda_graphs: str = key(
        "auto",
        "replay forward and backward as CUDA graphs; auto: on one GPU, and with parallel=ddp on one machine",
        choices=("auto", "on", "off"),
    )
    clip_norm: float | None = key(
        1.0,
        "largest global gradient norm [paper]; null: no clipping",
        also_called=("grad_clip", "max_grad_norm", "clip", "gradient_clipping"),
    )
    log_every: int = key(10, "updates between rows of metrics.jsonl")
    validate_every: int | None = key(
        100, "updates between validations; null: only at the end", also_called=("eval_interval", "eval_every")
    )
    validate_batches: int | None = key(None, "global batches per validation; null: all held-out text")
    save_every: int | None = key(
        100, "updates between checkpoints; null: only at the end", also_called=("save_interval", "checkpoint_every")
    )
    keep_checkpoints: int | None = key(2, "newest checkpoints kept; null: all")
    stop_at: int | None = key(None, "save and end after this update; the schedule is unchanged")
    max_skipped_steps: int = key(10, "non-finite updates in a row before the run gives up")
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    log_batches: bool = key(False, "record the sequence ids of every update in batches.jsonl")

    def validate(self) -> None:
        """Check lengths, batch and intervals."""
        exactly_one("train", self, "tokens", "steps")
        exactly_one("train", self, "micro_tokens", "micro_batch")
        positive(
            "train.", self, "tokens", "steps", "batch_tokens", "micro_tokens", "micro_batch", "log_every",
            "validate_every", "validate_batches", "save_every", "keep_checkpoints", "stop_at", "max_skipped_steps",
        )  # fmt: skip
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise UserError(f"train.clip_norm: got {self.clip_norm}, expected more than 0 (null: no clipping)")

    def sequences(self, context: int) -> int:
        """Sequences of `context` positions in a global batch. Raises UserError unless they divide it."""
        if self.batch_tokens % context:
            nearest = max(context, round(self.batch_tokens / context) * context)
            raise UserError(
                f"train.batch_tokens: got {self.batch_tokens}, expected a multiple of data.context={context}; "
                f"the nearest is {nearest}"
            )
        return self.batch_tokens // context


@dataclass
class OptimSettings:
    """AdamW; the learning rate is in `schedule`. Decay applies to matrices only."""

    betas: list[float] = key([0.9, 0.95], "decay of the first and second moment")
    eps: float = key(1e-8, "added to the root of the second moment")
    weight_decay: float = key(0.1, "decoupled decay of matrices [paper]", also_called=("wd",))

    def validate(self) -> None:
        """Check the ranges of AdamW's constants."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas: got {self.betas}, expected two numbers from 0 to below 1, e.g. [0.9,0.95]")
        if self.eps <= 0:
            raise UserError(f"optim.eps: got {self.eps}, expected more than 0, e.g. 1e-8")
        if self.weight_decay < 0:
            raise UserError(f"optim.weight_decay: got {self.weight_decay}, expected 0 or more")


@dataclass
class ScheduleSettings:
    """Learning rate: linear from `initial` to `peak`, then by `kind` (see `efla_lm.training.schedule`)."""

    kind: str = key("cosine", "shape after the warm-up", choices=("cosine", "wsd", "constant"))
    peak: float = key(
        3e-4, "rate at the end of the warm-up [paper]", also_called=("lr", "learning_rate", "max_lr", "peak_lr")
    )
    initial: float = key(3e-5, "rate of update 0 [paper]")
    final: float | None = key(
        3e-5, "rate of the last update [paper]; null for constant", also_called=("min_lr", "final_lr", "lr_min")
    )
    warmup_updates: int | None = key(
        "${size.warmup_updates}",
        "length of the warm-up",
        instead_of="warmup_tokens",
        also_called=("warmup", "warmup_steps", "num_warmup_steps", "warmup_iters"),
    )
    warmup_tokens: int | None = key(None, "length of the warm-up in tokens", instead_of="warmup_updates")
    decay_fraction: float | None = key(None, "share of all tokens in the final decay (wsd only)")

    def validate(self) -> None:
        """Check rates, and keys that belong to one kind only."""
        exactly_one("schedule", self, "warmup_updates", "warmup_tokens")
        for name in ("warmup_updates", "warmup_tokens", "initial", "final"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise UserError(f"schedule.{name}: got {value}, expected 0 or more")
        if self.peak <= 0:
            raise UserError(f"schedule.peak: got {self.peak}, expected a learning rate above 0, e.g. 3e-4")
        for name, kinds in (("final", ("cosine", "wsd")), ("decay_fraction", ("wsd",))):
            value = getattr(self, name)
            if self.kind in kinds and value is None:
                raise UserError(f"schedule.{name}: got null, expected a number for schedule.kind={self.kind}")
            if self.kind not in kinds and value is not None:
                raise UserError(
                    f"schedule.{name}: got {value}, but schedule.kind={self.kind} has no such value; "
                    f"set schedule.{name}=null"
                )
        if self.decay_fraction is not None and not 0 < self.decay_fraction <= 1:
            raise UserError(f"schedule.decay_fraction: got {self.decay_fraction}, expected above 0 and at most 1")


@dataclass
class ParallelSettings:
    """How the model is spread over the processes: a mesh of replicate x shard."""

    mode: str = key(
        "auto",
        "auto: single for one process, else fsdp",
        choices=("auto", "single", "ddp", "fsdp", "hsdp"),
    )
    replicate: int | None = key(None, "groups that hold a full copy (hsdp); null: what parallel.shard leaves")
    shard: int | None = key(None, "devices that share one copy (hsdp); null: the devices of one node")
    overlap: bool = key(
        True,
        "ddp without FSDP: sum gradients over ranks in the backward pass, block by block; false: all after it; "
        "elsewhere false is an error",
    )
    world_size: int | None = key(None, "processes expected; another number is an error. null: as launched")

    def validate(self) -> None:
        """Check keys that belong to one mode only."""
        positive("parallel.", self, "replicate", "shard", "world_size")
        for name in ("replicate", "shard"):
            value = getattr(self, name)
            if value is not None and self.mode != "hsdp":
                raise UserError(
                    f"parallel.{name}: got {value} with parallel.mode={self.mode}, which sets its own mesh; "
                    f"use parallel=hsdp, or parallel.{name}=null"
                )
        if self.mode == "single" and self.world_size not in (None, 1):
            raise UserError(f"parallel.world_size: got {self.world_size} with parallel.mode=single; use ddp or fsdp")


@dataclass
class LiveEvalSettings:
    """Tasks of lm-eval on the model in training; their metrics are rows of metrics.jsonl, `eval/TASK/METRIC`."""

    every: int | None = key(None, "updates between evaluations, the last update included; null: none")
    tasks: list[str] = key([], "lm-eval tasks; `heldout` is the held-out text of the token files")
    local_dir: str | None = key(None, "folder of local copies (see conf/tasks/paper.yaml); null: the hub", path=PATH)
    limit: int | None = key(None, "first documents of each task only; null: all")

    def validate(self) -> None:
        """Check that an interval and tasks are given together."""
        positive("eval.", self, "every", "limit")
        if (self.every is None) != (not self.tasks):
            raise UserError(
                f"eval.every={self.every} with eval.tasks={self.tasks}: give both, e.g. eval.every=1000 "
                "eval.tasks=[lambada_openai,hellaswag], or neither"
            )


@dataclass
class LoggerSettings:
    """Trackers beside `metrics.jsonl`, which is always written."""

    tensorboard: bool = key(False, "also write TensorBoard events under RUN/tensorboard")
    wandb: bool = key(False, "also log to Weights & Biases")
    wandb_mode: str = key("offline", "offline needs neither network nor key", choices=("offline", "online", "disabled"))
    wandb_project: str = key("efla-lm", "project of the tracker")
    wandb_entity: str | None = key(None, "team or user; null: the account's default")
    wandb_tags: list[str] = key([], "labels of the run")


@dataclass
class TrainSettings:
    """All of `train.py`."""

    name: str | None = key(None, "run directory under runs_dir, continued when it exists; null: a new one")
    runs_dir: str = key("runs", "folder of the run directories", path=PATH)
    resume: str = key(
        "auto", "auto: newest complete checkpoint of the run; never; or a path", path=PathRule(words=("auto", "never"))
    )
    seed: int = key(42, "seed of weights and data order [paper]")
    profile: int | None = key(None, "updates to trace after the first ten of a launch, into RUN/profile; null: none")
    size: SizeSettings = field(default_factory=SizeSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    train: LoopSettings = field(default_factory=LoopSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    eval: LiveEvalSettings = field(default_factory=LiveEvalSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)

    def validate(self) -> None:
        """Check what does not belong to one section alone."""
        name = self.name
        if name is not None and (not name.strip("/. ") or name.startswith("/") or ".." in name.split("/")):
            raise UserError(f"name: got {name!r}, expected a folder name under runs_dir={self.runs_dir}")
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"seed: got {self.seed}, expected 0 or more, below 2^63")
        positive("", self, "profile")
        context, micro = self.data.context, self.train.micro_tokens
        self.train.sequences(context)
        if micro is not None and micro < context:
            raise UserError(
                f"train.micro_tokens: got {micro}, expected at least one sequence of data.context={context}"
            )


@dataclass
class ExportSettings:
    """All of `python -m scripts.export`: a training checkpoint to Hugging Face format."""

    checkpoint: str = key(MISSING, "a run directory (its newest checkpoint) or a step-N folder", path=PATH)
    out: str | None = key(None, "folder to write; null: RUN/export", path=PATH)
