"""This process' device: ``get_accelerator()``, ``get_current_device()``, and its memory in bytes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from shardwise.checked import share
from shardwise.device import Accelerator, total_bytes
from shardwise.mesh.launch import default_device, own_device

__all__ = [
    "colo_device_memory_capacity",
    "colo_get_cpu_memory_capacity",
    "colo_set_process_memory_fraction",
    "get_accelerator",
    "get_current_device",
]


def get_accelerator() -> Accelerator:
    """Of the device that this process trains on: the rank's own GPU where there is one, else the CPU."""
    return Accelerator(own_device(default_device()))


def get_current_device() -> torch.device:
    """This process' GPU, or the CPU."""
    return get_accelerator().get_current_device()


def colo_get_cpu_memory_capacity() -> int:
    """Bytes of memory that this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def colo_device_memory_capacity(device: torch.device) -> int:
    """Bytes of memory that a GPU has; of the CPU, the host's divided by the number of ranks.

    Raises:
        TypeError: ``device`` is no ``torch.device``.
    """
    if not isinstance(device, torch.device):
        raise TypeError(f"device={device!r}: give a torch.device")
    if device.type == "cuda":
        return total_bytes(own_device(device))
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return colo_get_cpu_memory_capacity() // ranks


def colo_set_process_memory_fraction(ratio: float) -> None:
    """This process takes at most that share of its GPU's memory; beyond it an allocation fails.

    Raises:
        ValueError: it is no share.
        NotImplementedError: this process is on a CPU, whose allocator knows no limit.
    """
    share("ratio", ratio)
    accelerator = get_accelerator()
    if accelerator.name == "cpu":
        raise NotImplementedError(
            f"colo_set_process_memory_fraction({ratio}) on a CPU: give the plugin device_memory=bytes, which is "
            "enforced on every device"
        )
    accelerator.set_per_process_memory_fraction(ratio, accelerator.get_current_device())
