"""Every setting of training and data preparation, typed, with its default and a line of help.

The dataclasses own the defaults; a YAML file under `conf/` holds only what differs from them. Units are in the help
text: a token is a position, an update is one optimiser step, a rate is per update. [paper] marks values of arXiv
2512.12602v4, table of language-model settings, that are the same for every size; those of a size are in `conf/size/`.
"""

# ruff: noqa: RUF009  (`key` returns a dataclasses.field)

from dataclasses import dataclass, field

from efla_lm.models.rules import RULES
from efla_lm.settings.fields import MISSING, PATH, PathRule, key

SOURCE = PathRule(prefixes=("hub:", "builtin:"))
TOKENIZER = PathRule(words=("train",), existing=True)


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
class DataSettings:
    """One corpus: where its text comes from, how it is tokenised, where its token files lie, how they are read."""

    name: str = key("pydoc", "name of the corpus")
    dir: str = key("data/tokens/${data.name}", "folder of the token files", path=PATH)
    sources: list[str] = key([], "files, globs, folders, hub:NAME[:CONFIG], or builtin:pydoc", path=SOURCE)
    split: str = key("train", "split of a hub source")
    revision: str | None = key(None, "commit of a hub source; null: its newest")
    text_field: str = key("text", "field of a JSON or parquet row that holds the document")
    max_tokens: int | None = key(None, "training tokens to keep; null: everything")
    sample: str = key(
        "head",
        "what data.max_tokens keeps: the corpus's head, or documents chosen by their hash from all of it",
        choices=("head", "documents"),
    )
    deduplicate: bool = key(False, "leave out documents whose text came before, training text that is held out too")
    heldout_sources: list[str] | None = key(
        None, "held-out text, in the form of data.sources", path=SOURCE, instead_of="heldout_fraction"
    )
    heldout_fraction: float | None = key(
        0.01, "share of documents held out, chosen by their hash; 0: none", instead_of="heldout_sources"
    )
    split_seed: int = key(42, "seed of the held-out choice and of data.sample=documents")
    tokenizer: str = key(
        "train", "folder, file or hub name of a tokenizer; `train`: a BPE on the corpus", path=TOKENIZER
    )
    vocab_size: int = key(2048, "vocabulary of a BPE trained here (data.tokenizer=train)")
    bos: bool = key(False, "put BOS at the start of each document (EOS always ends it)")
    context: int = key(2048, "positions of one training window")
    packing: str = key(
        "stream",
        "stream: windows of the concatenated stream [paper]; documents: whole documents, each from an empty state",
        choices=("stream", "documents"),
    )
    max_documents: int | None = key(
        None, "documents per window (data.packing=documents); null: one per 64 positions, at least 8"
    )
    mixture: list[str] = key([], "folders of token files to mix for training; empty: data.dir alone", path=PATH)
    weights: list[float] = key([], "share of each folder of data.mixture in the windows, in any unit")
    mask_boundaries: bool = key(
        False, "leave out the loss of the position that predicts the next document's first token"
    )
    verify: bool = key(False, "check the SHA-256 of the token files before use")


@dataclass
class LoopSettings:
    """The training loop. A token is a position; a global batch is what one update sees over all devices."""

    tokens: int | None = key("${size.tokens}", "length of training, rounded up to whole updates", instead_of="steps")
    steps: int | None = key(None, "length of training in updates", instead_of="tokens")
    batch_tokens: int = key("${size.batch_tokens}", "tokens of a global batch, a multiple of data.context")
    micro_tokens: int | None = key(
        "${size.micro_tokens}",
        "most tokens a device takes at once; the largest even cut is used",
        instead_of="micro_batch",
    )
    micro_batch: int | None = key(None, "windows a device takes at once", instead_of="micro_tokens")
    precision: str = key("${size.precision}", "compute type; weights and optimiser stay fp32", choices=("fp32", "bf16"))
    compile: bool | None = key(
        None, "compile the blocks (torch.compile); null: on a GPU, but not packed documents by the torch backend"
    )
    activation_checkpointing: str = key(
        "auto",
        "selective: the backward pass computes all but products and mixer ops again; products: mixer ops too; full: "
        "whole blocks; auto: selective in compiled blocks, else none",
        choices=("auto", "none", "selective", "products", "full"),
    )
    cuda_graphs: str = key(
        "auto",
        "replay forward and backward as CUDA graphs; auto: on one GPU, and with parallel=ddp on one machine",
        choices=("auto", "on", "off"),
    )
    clip_norm: float | None = key(1.0, "largest global gradient norm [paper]; null: no clipping")
    log_every: int = key(10, "updates between rows of metrics.jsonl")
    validate_every: int | None = key(100, "updates between validations; null: only at the end")
    validate_batches: int | None = key(None, "global batches per validation; null: all held-out windows")
    save_every: int | None = key(100, "updates between checkpoints; null: only at the end")
    keep_checkpoints: int | None = key(2, "newest checkpoints kept; null: all")
    stop_at: int | None = key(None, "save and leave after this update; the schedule is unchanged")
    max_skipped_steps: int = key(10, "non-finite updates in a row before the run gives up")
    device: str = key("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    log_batches: bool = key(False, "record the window ids of every update in batches.jsonl")


@dataclass
class OptimSettings:
    """AdamW; the learning rate is in `schedule`. Decay applies to matrices only."""

    betas: list[float] = key([0.9, 0.95], "decay of the first and second moment")
    eps: float = key(1e-8, "added to the root of the second moment")
    weight_decay: float = key(0.1, "decoupled decay of matrices [paper]")


@dataclass
class ScheduleSettings:
    """Learning rate: linear from `initial` to `peak`, then by `kind` (see `efla_lm.training.schedule`)."""

    kind: str = key("cosine", "shape after the warm-up", choices=("cosine", "wsd", "constant"))
    peak: float = key(3e-4, "rate at the end of the warm-up [paper]")
    initial: float = key(3e-5, "rate of update 0 [paper]")
    final: float | None = key(3e-5, "rate of the last update [paper]; null for constant")
    warmup_updates: int | None = key("${size.warmup_updates}", "length of the warm-up", instead_of="warmup_tokens")
    warmup_tokens: int | None = key(None, "length of the warm-up in tokens", instead_of="warmup_updates")
    decay_fraction: float | None = key(None, "share of all tokens in the final decay (wsd only)")


@dataclass
class ParallelSettings:
    """How the model is spread over the processes: a mesh of replicate x shard."""

    mode: str = key(
        "auto",
        "auto: single for one process, else fsdp",
        choices=("auto", "single", "ddp", "fsdp", "hsdp"),
    )
    replicate: int | None = key(None, "groups that hold a full copy (hsdp); null: what data.shard leaves")
    shard: int | None = key(None, "devices that share one copy (hsdp); null: the devices of one node")
    overlap: bool = key(
        True,
        "ddp without FSDP: sum gradients over ranks in the backward pass, block by block; false: all after it; "
        "elsewhere false is an error",
    )
    world_size: int | None = key(None, "processes expected; another number is an error. null: as launched")


@dataclass
class LiveEvalSettings:
    """Tasks of lm-eval on the model in training; their metrics are rows of metrics.jsonl, `eval/TASK/METRIC`."""

    every: int | None = key(None, "updates between evaluations, the last update included; null: none")
    tasks: list[str] = key([], "lm-eval tasks; `heldout` is the held-out text of the token files")
    local_dir: str | None = key(None, "folder of local copies (see conf/tasks/paper.yaml); null: the hub", path=PATH)
    limit: int | None = key(None, "first documents of each task only; null: all")


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
        """Check values against each other; raises UserError. Called once by `compose` and `entry`."""
        from efla_lm.settings.checks import check_train

        check_train(self)


@dataclass
class PrepareSettings:
    """All of `python -m scripts.prepare`: the data section as training has it, and how to work."""

    overwrite: bool = key(False, "replace token files that were made from something else")
    processes: int | None = key(None, "worker processes; null: one per core. The result does not depend on it")
    data: DataSettings = field(default_factory=DataSettings)

    def validate(self) -> None:
        """Check values against each other; raises UserError. Called once by `compose` and `entry`."""
        from efla_lm.settings.checks import check_prepare

        check_prepare(self)


@dataclass
class ExportSettings:
    """All of `python -m scripts.export`: a training checkpoint to Hugging Face format."""

    checkpoint: str = key(MISSING, "a run directory (its newest checkpoint) or a step-N folder", path=PATH)
    out: str | None = key(None, "folder to write; null: RUN/export", path=PATH)
