"""The GPUs that we know: peak FLOP/s by the vendors' data sheets, and memory as their drivers report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    device: str  # a part of the name that the driver reports
    peak_flops: float  # dense bf16, without sparsity, FLOP/s
    memory_gib: float = 0.0  # 0: not known, so that `python -m scripts.plan` does not offer this GPU


# A device is the first row whose `device` is a part of its name, so longer names come first.
GPUS = {
    "a100-40gb": Gpu("A100", 312e12, 39.4),
    "a100-80gb": Gpu("A100", 312e12, 79.2),
    "h100-nvl": Gpu("H100 NVL", 835e12),
    "h100-pcie": Gpu("H100 PCIe", 756e12),
    "h100-80gb": Gpu("H100", 989e12, 79.2),
    "h200-141gb": Gpu("H200", 989e12, 139.8),  # the name of a GH200 holds this one; its peak is the same
    "b200-180gb": Gpu("B200", 2250e12, 178.4),
    "l40s-48gb": Gpu("L40S", 362e12, 44.4),
    "l4": Gpu("L4", 121e12),
    "rtx4090-24gb": Gpu("RTX 4090", 165.2e12, 23.5),
    "a40": Gpu("A40", 149.7e12),
    "a6000": Gpu("A6000", 154.8e12),
}
PLANNED_GPUS = tuple(name for name, gpu in GPUS.items() if gpu.memory_gib)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak in FLOP/s of the GPU that the driver calls `device_name`; None for one that is not listed."""
    return next((gpu.peak_flops for gpu in GPUS.values() if gpu.device in device_name), None)
