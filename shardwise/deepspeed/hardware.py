"""``get_accelerator()``: the device that this process computes on."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.core.base.device import allocator_bytes, make_current, process_memory, synchronize, visible_gpus
from shardwise.core.mesh import LaunchFacts, default_device

__all__ = ["Accelerator", "get_accelerator", "see_memory_usage"]


class Accelerator:
    """The GPU of this rank if every rank has one, else the CPU. ``device_index=None`` is this rank's own device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"get_accelerator().{name} is not available: call torch's function for {self.device_name()!r}",
            name=name,
            obj=self,
        )

    def device_name(self, device_index: int | None = None) -> str:
        """Return ``"cpu"``, ``"cuda"`` or, with a number, ``"cuda:1"``."""
        kind = self._device.type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def set_device(self, device_index: int) -> None:
        """Set the device of this process."""
        self._device = torch.device(self.device_name(device_index))
        make_current(self._device)

    def current_device(self) -> int | str:
        """Return the index of the current device; ``"cpu"`` on a CPU."""
        return "cpu" if self._device.type == "cpu" else self._device.index or 0

    def current_device_name(self) -> str:
        """Return a name such as ``"cuda:0"``."""
        return str(self._device)

    def device_count(self) -> int:
        """Return the number of visible GPUs; on a CPU the number of processes on this host."""
        return LaunchFacts.read().local_world_size if self._device.type == "cpu" else visible_gpus()

    def is_available(self) -> bool:
        """Return True: there is always a device, and torch computes in 16 bits on each."""
        return True

    is_bf16_supported = is_fp16_supported = is_available

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is on a device of this kind."""
        return tensor.device.type == self._device.type

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the work on the device."""
        device = self._device if device_index is None else torch.device(self.device_name(device_index))
        synchronize(device)

    def communication_backend_name(self) -> str:
        """Return the backend of ``torch.distributed``."""
        return "gloo" if self._device.type == "cpu" else "nccl"

    def manual_seed(self, seed: int) -> torch.Generator:
        """Call ``torch.manual_seed``, which seeds every device."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the bytes allocated on this rank's device; on a CPU the memory of this process."""
        return process_memory()[0] if self._device.type == "cpu" else allocator_bytes(self._device)[0]

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the maximum of :meth:`memory_allocated` so far."""
        return process_memory()[1] if self._device.type == "cpu" else allocator_bytes(self._device)[1]

    def empty_cache(self) -> None:
        """Do nothing: freed blocks are reused."""


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process."""
    return Accelerator(default_device())


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print ``message`` and the memory of this process on rank 0 if ``force``."""
    if force and not LaunchFacts.read().rank:
        device = get_accelerator()
        print(f"{message}: {device.memory_allocated():,} bytes on {device.current_device_name()}", flush=True)
