"""Which GPUs this process sees, and which GPU each of them really is."""

from __future__ import annotations

from glob import glob

from shardwise.core.base.device.runtime import runtime

__all__ = ["gpu_identity", "gpus_of_host", "visible_gpus"]


def visible_gpus() -> int:
    """How many GPUs torch can use in this process."""
    return runtime().device_count()


def gpus_of_host() -> int:
    """How many NVIDIA GPUs the system shows to this process, whether torch can use them or not."""
    return len(glob("/dev/nvidia[0-9]*"))


def gpu_identity(index: int, visible: str | None) -> str | None:
    """What tells GPU ``index`` of this process from every other one, on any host; ``None`` where nothing does.

    Args:
        index: as torch counts.
        visible: ``CUDA_VISIBLE_DEVICES``. Parts of one GPU (MIG) are told apart by their names there alone, since CUDA
            may give all of them the identity of the whole.
    """
    entries = [entry.strip() for entry in (visible or "").split(",")]
    if index < len(entries) and entries[index].startswith("MIG"):
        return entries[index]
    name, uuid = runtime().identity(index)
    if "MIG" in name:
        return None
    return None if uuid is None else f"GPU-{uuid}"
