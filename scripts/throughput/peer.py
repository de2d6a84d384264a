"""flash-linear-attention's models trained as its own trainer, flame, does: the baseline of `scripts.throughput`.

Each block and the rest are FSDP2 groups with bf16 weights and fp32 reduction. AdamW is fused, the loss is the fused
linear cross-entropy, gradients are clipped to norm 1. Nothing is compiled: its ops break the graph, which is slower. In
every step the host reads the gradient norm, to skip a step that is not finite, and the loss, as flame's recipes do
(https://github.com/fla-org/flame, README: `--training.skip_nan_inf`, `--metrics.log_freq 1`). Without
`point.peer_waits` it reads neither: this is the speed of fla's model in a loop that never waits for the device. Batches
and learning rates are those of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from efla_lm.errors import UserError
from efla_lm.settings import ModelSettings, TrainSettings
from efla_lm.training.trainer import set_up
from scripts.throughput.point import Point, Prepared
from scripts.throughput.settings import PEERS


def peer_config(model: str, ours: ModelSettings) -> Any:
    """fla's config of `model` at the width and depth of ours. Raises UserError for a model that fla does not have."""
    import fla.models

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


class Peer(Prepared):
    """A model of fla with its optimiser, on the batches and learning rates of ours (see `Subject`)."""

    def __init__(self, point: Point, settings: TrainSettings) -> None:
        if settings.train.device == "cpu" or not torch.cuda.is_available():
            raise UserError("fla needs a CUDA device")
        setup = set_up(settings)
        self.waits = point.peer_waits
        torch.manual_seed(settings.seed)
        config = peer_config(point.model, settings.model)
        model = AutoModelForCausalLM.from_config(config).float().to(setup.world.device).train()
        super().__init__(setup, sum(p.numel() for p in model.parameters()))
        mesh = setup.mesh
        options: dict[str, Any] = {
            "mesh": mesh["shard"] if mesh["replicate"].size() == 1 else mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "reshard_after_forward": mesh["shard"].size() > 1,
        }
        for block in model.model.layers if hasattr(model, "model") else model.backbone.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=settings.optim.weight_decay, fused=True
        )
        self.loss = torch.zeros((), device=self.device)

    def step(self, number: int) -> None:
        """See `Subject`."""
        self.setup.set_learning_rate(self.optimizer, number)
        batches = self.setup.batches(number)
        for batch in batches:
            ids = batch.input_ids.pin_memory().to(self.device, non_blocking=True)
            loss = self.model(input_ids=ids, labels=ids).loss / len(batches)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not self.waits or bool(norm.isfinite()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.detach() * len(batches)
        if self.waits:
            self.loss.item()

    def settle(self) -> float:
        """See `Subject`."""
        return float(self.loss)

    def close(self) -> None:
        """See `Subject`: there is nothing to free."""
