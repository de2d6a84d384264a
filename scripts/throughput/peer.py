"""flash-linear-attention's models trained as its own trainer, flame, does: the baseline of `scripts.throughput`.

Each block and the rest are FSDP2 groups with bf16 weights and fp32 reduction; AdamW is fused, the loss is the fused
linear cross-entropy, gradients are clipped to norm 1, nothing is compiled (its ops break the graph: it gets slower).
In an update the host reads the gradient's norm, so as to skip one that is not finite, and the loss: flame's recipes
(https://github.com/fla-org/flame, README: `--training.skip_nan_inf`, `--metrics.log_freq 1`) do both in every update.
Without `point.peer_waits` it reads neither: what fla's model gives in a loop that never asks the device.
Batches and learning rate are those that ours gets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from efla_lm.errors import UserError
from efla_lm.models import flops_per_token
from efla_lm.parallel.distributed import build_mesh, start
from efla_lm.settings import TrainSettings
from efla_lm.training import build, corpus, schedule
from efla_lm.training.batch_plan import plan_budget
from scripts.throughput.point import Point
from scripts.throughput.settings import PEERS


def peer_config(model: str, settings: TrainSettings) -> Any:
    """fla's config of `model` at the width and depth of ours. Raises UserError for a model that fla does not have."""
    import fla.models

    ours = settings.model
    common = {
        "hidden_size": ours.hidden_size,
        "vocab_size": ours.vocab_size,
        "num_hidden_layers": ours.num_hidden_layers,
        "use_cache": False,
        "fuse_cross_entropy": False,
        "fuse_linear_cross_entropy": True,
    }
    if model == "deltanet":
        return fla.models.DeltaNetConfig(num_heads=ours.num_heads, intermediate_size=ours.intermediate_size, **common)
    if model == "gated_deltanet":
        return fla.models.GatedDeltaNetConfig(
            num_heads=ours.num_heads, head_dim=ours.head_dim, expand_v=1, intermediate_size=ours.intermediate_size,
            **common,
        )  # fmt: skip
    if model == "mamba2":
        return fla.models.Mamba2Config(
            head_dim=ours.mamba_head_dim, state_size=ours.state_size, n_groups=ours.num_groups, expand=ours.expand,
            **common,
        )  # fmt: skip
    if model == "transformer":
        return fla.models.TransformerConfig(
            num_heads=ours.num_heads, intermediate_size=ours.intermediate_size, **common
        )
    raise UserError(f"fla has no model {model}: expected one of {', '.join(PEERS)}")


class Peer:
    """A model of fla with its optimiser and batches (`train_point.Subject`)."""

    def __init__(self, point: Point, settings: TrainSettings) -> None:
        if settings.train.device == "cpu" or not torch.cuda.is_available():
            raise UserError("fla needs a CUDA device")
        world = start("cuda", settings.parallel.world_size)
        self.waits = point.peer_waits
        self.settings, self.device, self.world_size, self.is_main = settings, world.device, world.size, world.is_main
        self.budget = plan_budget(settings.train, settings.data.context, world.size)
        self.batch_tokens = self.budget.batch_tokens
        data = corpus.open_corpus(settings.data, world)
        self.data, _ = corpus.build_loaders(settings, self.budget, data, world)
        torch.manual_seed(settings.seed)
        model = AutoModelForCausalLM.from_config(peer_config(point.model, settings)).float().to(world.device).train()
        embedding = settings.model.hidden_size * (settings.model.vocab_size or 0)
        self.parameters = sum(p.numel() for p in model.parameters()) - embedding
        self.flops = flops_per_token(build.build_config(settings, data.first), self.budget.context)
        mesh = build_mesh(world, settings.parallel.mode, settings.parallel.replicate, settings.parallel.shard)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options: dict[str, Any] = {
            "mesh": mesh["shard"] if mesh["replicate"].size() == 1 else mesh,
            "mp_policy": policy,
            "reshard_after_forward": mesh["shard"].size() > 1,
        }
        for block in model.model.layers if hasattr(model, "model") else model.backbone.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=settings.optim.weight_decay, fused=True
        )
        self.loss = torch.zeros((), device=world.device)

    def step(self, number: int) -> None:
        """See `train_point.Subject`."""
        budget = self.budget
        lr = schedule.learning_rate(
            self.settings.schedule, number * budget.batch_tokens, budget.total_tokens, budget.batch_tokens
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for micro in range(budget.micro_steps):
            ids = self.data.batch(number, micro).input_ids.pin_memory().to(self.device, non_blocking=True)
            loss = self.model(input_ids=ids, labels=ids).loss / budget.micro_steps
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not self.waits or bool(norm.isfinite()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.detach() * budget.micro_steps
        if self.waits:
            self.loss.item()

    def settle(self) -> float:
        """See `train_point.Subject`."""
        return float(self.loss)

    def close(self) -> None:
        """See `train_point.Subject`: nothing was recorded."""
