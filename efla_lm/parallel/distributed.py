"""Processes, devices and sharding: the one module that knows how many processes there are.

accelerate finds the processes of the launcher and places their devices; nothing goes through its `prepare`. Several
processes share the model by torch FSDP2 (`fully_shard`), with gloo on a CPU too, so that the tests run the path that
trains on GPUs. A process that needs no shards of others holds the whole model without FSDP (`hold_whole`): the hooks of
FSDP would cost the host as much as the rest of a small step, and they cannot be recorded as a CUDA graph.

    mode     mesh (replicate x shard)
    single   1 x 1                  one process, no FSDP
    ddp      N x 1                  every rank holds all weights and gradients are all-reduced: on one machine without
                                    FSDP (unless train.cuda_graphs=off; `efla_lm.parallel.overlap`), else by FSDP
    fsdp     1 x N                  weights, gradients and optimiser state are sharded over all ranks
    hsdp     nodes x ranks/node     sharded within a node, replicated over nodes (or as `replicate`, `shard` say)
    auto     single for one process, else fsdp
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from efla_lm.devices import choose_device
from efla_lm.errors import UserError
from efla_lm.models import EflaForCausalLM
from efla_lm.parallel.overlap import sums_of

T = TypeVar("T")

# Decay and step-size parameters: a few numbers per head that enter through an exponential. FSDP casts its parameters to
# the compute dtype and needs one dtype per group, so it does not manage these: every rank holds them whole, in fp32.
FP32_PARAMETERS = ("A_log", "dt_bias", "D")


@dataclass(frozen=True)
class World:
    """The processes of this launch. `control` is a gloo group for objects and checkpoints; it never waits for a GPU."""

    rank: int
    size: int
    local_size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place, on its device; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its value on all ranks.

        If it raises, rank 0 raises that error and the other ranks exit with code 1 in silence: no rank waits for a
        result that does not come, and the reason is printed once.
        """
        value, error = None, None
        if self.is_main:
            try:
                value = work()
            except BaseException as raised:
                error = raised
        failed, value = self.broadcast((error is not None, value))
        if error is not None:
            raise error
        if failed:
            raise SystemExit(1)
        return cast(T, value)


def start(device: str = "auto", world_size: int | None = None, key: str = "train.device") -> World:
    """Join the processes that the launcher started and take the device of this process.

    device: auto (CUDA where there is one), cpu or cuda; key: the setting that says so. world_size: the number of
    processes that the user expects (`parallel.world_size`), or None. Raises UserError if the launcher was asked for
    several processes and this one is alone, if the number is not the expected one, or if a GPU is missing.
    """
    kind = choose_device(device, key).type
    if kind == "cuda" and (local_size := int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) > torch.cuda.device_count():
        raise UserError(
            f"{local_size} processes were started on this machine but it has {torch.cuda.device_count()} GPU(s): "
            f"start one process per GPU, or set {key}=cpu"
        )
    # rank 0 writes exports and prepares folders while the others wait; NCCL's default of 10 minutes is short for that
    state = PartialState(cpu=kind == "cpu", timeout=timedelta(minutes=60))
    if state.num_processes == 1:
        _refuse_lonely_process()
    if world_size is not None and world_size != state.num_processes:
        raise UserError(f"parallel.world_size={world_size} but {state.num_processes} process(es) run: {_HOW_TO_LAUNCH}")
    if state.num_processes == 1 and not dist.is_initialized():
        backend = "gloo" if kind == "cpu" else "nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    control = dist.group.WORLD if kind == "cpu" else dist.new_group(backend="gloo", timeout=timedelta(minutes=60))
    assert control is not None
    return World(
        rank=state.process_index,
        size=state.num_processes,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=torch.device("cpu") if kind == "cpu" else torch.device("cuda", torch.cuda.current_device()),
        control=control,
    )


def finish(failed: bool = False) -> None:
    """Leave the process group.

    failed: whether an error ends this process. Its peers may be gone then, so that nothing may wait for them: NCCL's
    communicators are aborted (without that torch warns at exit), and gloo's are left to the end of the process.
    """
    if dist.is_initialized():
        if not failed:
            dist.destroy_process_group()
        elif dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()


@contextlib.contextmanager
def leaving_process_group() -> Iterator[None]:
    """Call `finish` at the end of the block, whether it ends well or with an error."""
    try:
        yield
    except BaseException:
        finish(failed=True)
        raise
    finish()


_HOW_TO_LAUNCH = (
    "start them with `torchrun --nproc-per-node=N train.py ...` (CPU and GPU) or `accelerate launch --multi_gpu "
    "--num_processes N train.py ...`"
)


def _refuse_lonely_process() -> None:
    """Raise UserError if a launcher was asked for several processes and gave them no ranks.

    `accelerate launch --num_processes 2` on a machine without GPUs starts one process with a rendezvous address and no
    rank. mpirun and srun start several that do not know each other and would all write to the same run.
    """
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UserError(f"accelerate was asked for several processes but started one, without a rank: {_HOW_TO_LAUNCH}")
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if int(os.environ.get(name) or 1) > 1:
            raise UserError(f"{name}={os.environ[name]} but each process stands alone: {_HOW_TO_LAUNCH}")


def build_mesh(world: World, mode: str, replicate: int | None = None, shard: int | None = None) -> DeviceMesh:
    """The device mesh [replicate, shard] of a parallel mode (table above); `replicate` and `shard` override its sizes.

    Raises UserError if the sizes do not multiply to the world size or contradict the mode.
    """
    if mode == "auto":
        mode = "single" if world.size == 1 else "fsdp"
    if mode == "hsdp":
        shard = shard or (world.size // replicate if replicate else world.local_size)
    default = {"single": (1, 1), "ddp": (world.size, 1), "fsdp": (1, world.size), "hsdp": (0, shard or 1)}
    if mode not in default:
        raise UserError(f"parallel.mode: expected auto, single, ddp, fsdp or hsdp, got {mode!r}")
    replicate = replicate or default[mode][0] or world.size // default[mode][1]
    shard = shard or default[mode][1]
    if (mode in ("single", "ddp") and shard != 1) or (mode in ("single", "fsdp") and replicate != 1):
        raise UserError(f"parallel.mode={mode} cannot have replicate={replicate}, shard={shard}: use parallel=hsdp")
    if replicate * shard != world.size:
        raise UserError(
            f"parallel.mode={mode}: replicate={replicate} x shard={shard} = {replicate * shard} ranks, "
            f"but {world.size} process(es) run: {_HOW_TO_LAUNCH}"
        )
    return init_device_mesh(world.device.type, (replicate, shard), mesh_dim_names=("replicate", "shard"))


def holds_whole(mode: str, world: World, cuda_graphs: str) -> bool:
    """Whether ranks hold the whole model without FSDP: one process, or `ddp` on one machine if graphs are not off.

    Gradients are then summed in the backward pass (`efla_lm.parallel.overlap`), or after it with
    parallel.overlap=false. Several machines without FSDP are not tested, so they use FSDP.
    """
    if mode == "single" or (mode == "auto" and world.size == 1):
        return True
    return mode == "ddp" and cuda_graphs != "off" and world.local_size == world.size


def compute_type(model: nn.Module, precision: str) -> torch.dtype | None:
    """The type that `train.precision` computes in; None: that of the masters, which must be fp32 (else ValueError)."""
    wrong = [name for name, p in model.named_parameters() if p.dtype != torch.float32]
    if wrong:
        raise ValueError(f"master weights must be float32: {len(wrong)} parameters are not, the first is {wrong[0]}")
    if precision not in ("fp32", "bf16"):
        raise UserError(f"train.precision: expected fp32 or bf16, got {precision!r}")
    return torch.bfloat16 if precision == "bf16" else None


def hold_whole(model: EflaForCausalLM, precision: str) -> None:
    """Without FSDP: this device holds all fp32 masters, and the forward pass casts them to `EflaModel.compute`.

    The gradients of cast weights are fp32 and add up in fp32 over micro-batches.
    """
    model.model.compute = compute_type(model, precision)


def shard_model(model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, precision: str) -> None:
    """Shard `model` over `mesh` in place: each block is one FSDP group, the rest (embeddings, last norm, head) another.

    Tied embeddings work because that last group holds both. Gradients are summed over ranks, not averaged: the loss is
    already divided by the global number of targets. precision: fp32, or bf16 (weights are gathered and used in bf16,
    gradients are reduced in fp32). Master weights must be fp32 (ValueError otherwise). FP32_PARAMETERS stay whole, see
    `reduce_whole`.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_type(model, precision),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # hidden states have the embedding's dtype; a silent cast would hide mistakes
    )
    whole = {p for name, p in model.named_parameters() if is_whole(name)}
    # with one shard per replica there is nothing to free after the forward pass; a second gather would only cost time
    reshard = mesh["shard"].size() > 1
    fsdp_mesh = mesh["shard"] if mesh["replicate"].size() == 1 else mesh
    for block in blocks:
        fully_shard(block, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=whole)
    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=whole)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def is_whole(name: str) -> bool:
    """Whether the parameter called `name` stays whole and fp32 on every rank."""
    return name.rpartition(".")[2] in FP32_PARAMETERS


def reduce_whole(model: nn.Module, world: World) -> None:
    """Sum over ranks the gradients that the backward pass did not sum: of FP32_PARAMETERS with FSDP, else all."""
    sharded = isinstance(model, FSDPModule)
    grads = [p.grad for name, p in model.named_parameters() if p.grad is not None and (not sharded or is_whole(name))]
    if world.size == 1 or sums_of(model) is not None or not grads:
        return
    with dist._coalescing_manager():  # one collective
        for grad in grads:
            dist.all_reduce(grad)


def reshard(model: nn.Module) -> None:
    """Free the gathered weights, so that the parameters are the sharded masters again (after a forward pass alone)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor (a view), or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
