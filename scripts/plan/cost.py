"""What a recipe costs before it is run: memory of a device, tokens per second, days, GPU-hours.

Symbols: P parameters, of which P_b in one block and P_0 in embeddings, last norm and head; L blocks; s devices that
share one copy of the weights; m tokens of a micro-batch on one device; b bytes of the compute type (2 for bf16);
D, A, F widths of the residual stream, of all heads, of the SwiGLU; H heads of K x V, C = 64 the kernels' chunk.

Memory of one device in bytes, as torch counts what it has allocated:

    weights       4 P / s        fp32 masters
    optimizer     8 P / s        two fp32 moments of AdamW
    gathered      b P            s = 1: the compute copy of all weights stays, kept by FSDP or for the backward pass
                  b (P_0 + 2 P_b)  s > 1: the root group, the block at work and the next one; one process that casts
                  weights again in the backward pass (selective, full): the head and 2 P_b
    gradients     4 P / s        fp32, reduced; with several micro-batches and FSDP 4 P more, which add up unsharded
                  (FSDP: several processes, unless parallel=ddp on one machine)
    activations   b m (L a + 2 D)  a elements per token and block, see `saved_per_token`; full activation checkpointing:
                  b m ((L + 2) D + a)   each block's input, and one block's elements while it is recomputed
    loss          max(4 R V, b V D) + 4 V D + b m D   R rows of logits at a time (`logit_rows`: 4096
                  from m = 32,768 on and up to V = 65,536, else 2048), whose gradient takes their place; the head's
                  gradient (fp32 sums, and what is made of them once the logits are gone), the hidden states'
    workspace     b m (3 F + 2 D) + (b + 4) P_b       the widest gradients of one block's backward pass: those of gate,
                  up and their product; 2 E for 3 F in Mamba-2

The peak is reached in the loss (all activations, no new gradients yet), at the start of the backward pass (all
activations, one block's gradients, the head's 4 V D) or at its end (all gradients, few activations): the largest sum is
taken. What the CUDA context and fragmentation take is not in it, so
that `fits` leaves a share of the device free.

Speed: tokens/s of one device = MFU x peak FLOP/s / FLOPs per token (`efla_lm.models.flops_per_token`), with a measured
MFU where there is one (`scripts.plan.measured`), else an assumed one.
"""

from __future__ import annotations

from dataclasses import dataclass

from efla_kernels.layers.cross_entropy import logit_rows

from efla_lm.models import EflaConfig, count_parameters
from efla_lm.parallel.gpus import Gpu

CHUNK, SSD_CHUNK = 64, 128  # tokens of the kernels' chunks
GPUS_PER_MACHINE = 8  # assumed
GIB = 2**30


def saved_per_token(config: EflaConfig, checkpointing: str = "none") -> float:
    """a: elements of the compute type that one block keeps per token for its backward pass.

    Blocks keep the inputs of matmuls and ops, and what cannot be computed from them without another matmul; a test
    reads the same list from the graph that torch.compile cuts (fp32 numbers count twice). Brackets: not kept with
    checkpointing="selective". Braces: not kept with "products" either (`efla_lm.parallel.activation_checkpointing`):

        every block       D (the stream that its norm reads) + 2 (the norm's factors, fp32)
        with SwiGLU       D + 2 (the same before it) + 2 F (gate and up)
        delta rules       3 A (before the convolution) [+ 2 A (q, k)] + H (gates' logits; 2 H with a decay)
                          [+ A (v) with a decay or backend=triton_recompute]
                          {+ A + 2 H (the normed output and its factors)}, or with an output gate
                          + A (gate) {+ A (output)} [+ A (normed and gated)]
                          {+ H (C + table)}  (inverse; the gates' table of 8 numbers, gated: 10)
                          {+ H (C + K V / C + V)}  (scores, chunk states, solved rows; not with
                          backend=triton_recompute)
        attention         3 A (q, k, v) + A (output) + 2 H (log-sums)
        Mamba-2           2 E + 2 G N + heads (projection) [+ E + 2 G N (after the convolution)] {+ E (output)} [+ E
                          (normed)] {+ heads (4 + N P / 128)}  (the gates' table, states of chunks of 128 tokens)
    """
    D, A, F, H = config.hidden_size, config.key_size, config.intermediate_size, config.num_heads
    again = checkpointing in ("selective", "products")  # what is cheap is computed again
    states = config.backend != "triton_recompute"
    mixer: float
    op: float
    if config.mixer == "mamba2":
        E, narrow = config.inner_size, 2 * config.num_groups * config.state_size
        op = E + 4 * config.mamba_heads + states * E * config.state_size / SSD_CHUNK
        mixer = 2 * E + narrow + config.mamba_heads + (0 if again else (E + narrow) + E)
        mixer += 0 if checkpointing == "products" else op
    elif config.rule.delta:
        K = V = config.head_dim
        decays = config.rule.gated
        op = A + H * (CHUNK + (10 if decays else 8)) + states * H * (CHUNK + K * V / CHUNK + V)
        op += 0 if config.output_gate else 2 * H
        keeps_values = decays or not states or config.rule.value_power != 0
        mixer = (3 if again else 5 + keeps_values) * A + (2 if decays else 1) * H
        if config.output_gate:
            mixer += (1 if again else 2) * A
        mixer += 0 if checkpointing == "products" else op
    else:
        mixer = 4 * A + 2 * H
    elements: float = D + 2 + mixer
    if config.mlp:
        elements += D + 2 + 2 * F
    return float(elements)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, by what they hold (the module's table)."""

    weights: float
    optimizer: float
    gathered: float
    gradients: float
    activations: float
    loss: float
    workspace: float
    accumulates: bool
    held_at_end: float  # activations at the end of the backward pass
    head: float  # the gradient of the head

    @property
    def peak(self) -> float:
        """Most bytes at once."""
        always = self.weights + self.optimizer + self.gathered
        in_loss = self.activations + self.loss + (self.gradients if self.accumulates else 0.0)
        at_start = self.activations + self.workspace + (self.gradients if self.accumulates else self.head)
        at_end = self.gradients + self.held_at_end + self.workspace
        return always + max(in_loss, at_start, at_end)

    @property
    def peak_gib(self) -> float:
        """`peak` in GiB."""
        return self.peak / GIB

    def parts_gib(self) -> dict[str, float]:
        """The parts in GiB, in the order of the table."""
        names = ("weights", "optimizer", "gathered", "gradients", "activations", "loss", "workspace")
        return {name: getattr(self, name) / GIB for name in names}


def memory(
    config: EflaConfig,
    *,
    micro_tokens: int,
    shards: int = 1,
    micro_steps: int = 1,
    precision: str = "bf16",
    checkpointing: str = "none",
    whole: bool = False,
) -> Memory:
    """The table of the module for one device that takes `micro_tokens` at once and holds 1 / `shards` of the state.

    checkpointing: as `train.activation_checkpointing`. whole: one process, without FSDP.
    """
    b, m = 2 if precision == "bf16" else 4, micro_tokens
    D, V, L = config.hidden_size, config.vocab_size, config.num_hidden_layers
    P = count_parameters(config)
    root = V * D * (1 if config.tie_word_embeddings else 2) + D
    block = (P - root) / L
    one_block = saved_per_token(config)  # while its backward pass is at work
    if checkpointing == "full":
        activations = b * m * ((L + 2) * D + one_block)
        held = b * m * (2 * D + one_block)
    else:
        activations = b * m * (L * saved_per_token(config, checkpointing) + 2 * D)
        held = b * m * one_block
    accumulates = micro_steps > 1
    gathered = float(b * P) if shards == 1 else b * (root + 2 * block)
    if whole:
        cast = b * (V * D + 2 * block) if checkpointing != "none" else gathered
        gathered = 0.0 if precision == "fp32" else cast
    widest = 3 * config.intermediate_size if config.mlp else 2 * config.inner_size
    return Memory(
        weights=4 * P / shards,
        optimizer=8 * P / shards,
        gathered=gathered,
        gradients=4 * P / shards + (4 * P if accumulates and not whole else 0),
        activations=float(activations),
        loss=float(max(4 * logit_rows(m, V) * V, b * V * D) + 4 * V * D + b * m * D),
        workspace=b * m * (widest + 2 * D) + (b + 4) * block,
        accumulates=accumulates,
        held_at_end=float(held),
        head=float(4 * V * D),
    )


def largest_micro_batch(
    config: EflaConfig, gpu: Gpu, *, context: int, windows: int, margin: float, shards: int, **options: object
) -> int | None:
    """The most windows of `context` that fit on a device at once, among the even cuts of its `windows` per update.

    margin: share of the memory that is left free. None if not even one fits.
    """
    for micro in range(windows, 0, -1):
        if windows % micro == 0:
            need = memory(
                config,
                micro_tokens=micro * context,
                shards=shards,
                micro_steps=windows // micro,
                **options,  # type: ignore[arg-type]
            )
            if fits(need, gpu, margin):
                return micro
    return None


def fits(need: Memory, gpu: Gpu, margin: float) -> bool:
    """Whether the device has that much and `margin` (a fraction of it) to spare."""
    return need.peak_gib <= (1 - margin) * gpu.memory_gib


@dataclass(frozen=True)
class Duration:
    """Time of a run."""

    tokens_per_second: float  # of all devices
    seconds: float
    gpus: int
    network_share: float = 1.0  # of their speed that devices keep while machines exchange weights and gradients

    @property
    def days(self) -> float:
        """Of the clock."""
        return self.seconds / 86400

    @property
    def gpu_hours(self) -> float:
        """Of all devices together."""
        return self.seconds / 3600 * self.gpus


def duration(tokens: int, per_device: float, gpus: int, efficiency: float, network_share: float = 1.0) -> Duration:
    """Time for `tokens` at `per_device` tokens/s on one device; several keep the share `efficiency` of it each, and
    `network_share` of that on several machines."""
    rate = per_device * gpus * (efficiency if gpus > 1 else 1.0) * network_share
    return Duration(rate, tokens / rate, gpus, network_share)


def network_bytes(parameters: int, gpus: int, shards: int, micro_steps: int) -> float:
    """Bytes into each machine in a step, P parameters over n machines:

    (n - 1) / n x (4 P micro_steps + 4 P)   weights in bf16 for both passes of every micro-batch, gradients in fp32
                                            (`fsdp`: one copy of the state spans the machines)
    (n - 1) / n x 8 P                       gradients summed between the copies (`hsdp`, `ddp`)
    """
    machines = -(-gpus // GPUS_PER_MACHINE)
    gathered = 4 * parameters * micro_steps if shards > GPUS_PER_MACHINE else 4 * parameters
    return (machines - 1) / machines * (gathered + 4 * parameters)


def network_share(sent: float, step_seconds: float, gigabytes_per_second: float) -> float:
    """The share of its speed that a device keeps: a step of t seconds with c seconds of network becomes

        t + max(c / 4, c - t)

    The work hides the rest. The quarter is what two H200 lost of their communication (docs/speed.md).
    """
    seconds = sent / (1e9 * gigabytes_per_second)
    return step_seconds / (step_seconds + max(seconds / 4, seconds - step_seconds))
