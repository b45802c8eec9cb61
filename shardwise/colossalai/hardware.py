"""``get_accelerator()`` and ``get_current_device()``: the device that this process computes on."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from shardwise.core.base.device import make_current, numbered, process_memory, synchronize, visible_gpus
from shardwise.core.base.validate import check_type
from shardwise.core.mesh.launch import default_device, own_device


class Accelerator:
    """One interface to a GPU or the CPU (:class:`CpuAccelerator`). Other attributes are those of ``torch.cuda``.

    Attributes:
        device: the device.
        name: ``"cuda"`` or ``"cpu"``.
        communication_backend: ``"nccl"`` or ``"gloo"``.
        support_set_device: whether there are several such devices.
    """

    is_synchronous = False
    support_set_device = True
    communication_backend = "nccl"
    _torch: Any = torch.cuda

    def __init__(self, device: torch.device) -> None:
        check_type("device", device, torch.device, "a torch.device")
        self.device, self.name = device, device.type

    def __repr__(self) -> str:
        return f"Accelerator({str(self.device)!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._torch, name)
        except AttributeError:
            raise AttributeError(
                f"{name!r} of {self.name}: {self._torch.__name__} has no such attribute; use a GPU, or leave it out",
                name=name,
                obj=self,
            ) from None

    def get_version(self) -> str:
        """Return the version of CUDA; empty on the CPU."""
        return str(torch.version.cuda or "") if self.name == "cuda" else ""

    def get_current_device(self) -> torch.device:
        """Return the current GPU with its index, or the CPU."""
        return numbered(torch.device(self.name))

    def set_device(self, device: torch.device | int | None = None) -> None:
        """Set the current GPU (``None``: the rank's own); does nothing on the CPU."""
        make_current(torch.device(self.name, device) if isinstance(device, int) else device or self.device)

    def device_count(self) -> int:
        """Return the number of visible GPUs; 1 on the CPU."""
        return visible_gpus()

    def synchronize(self, device: torch.device | int | str | None = None) -> None:
        """Wait for the work of the device."""
        if device is None:
            device = self.get_current_device()
        synchronize(torch.device(self.name, device) if isinstance(device, int) else torch.device(device))

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of the device's generator."""
        state: torch.Tensor = self._torch.get_rng_state("cuda" if device is None else device)
        return state

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the device's generator."""
        self._torch.set_rng_state(new_state, "cuda" if device is None else device)

    def autocast(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
        """Return ``torch.amp.autocast`` for this device."""
        return torch.amp.autocast(self.name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class CpuAccelerator(Accelerator):
    """The CPU. Memory, in bytes, is that of the process, and there is no cache to empty."""

    support_set_device = False
    communication_backend = "gloo"
    _torch = torch.cpu

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)

    def current_device(self) -> int:
        """Return 0."""
        return 0

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """Return the state of the CPU's generator."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the CPU's generator."""
        torch.set_rng_state(new_state)

    def empty_cache(self) -> None:
        """Do nothing."""

    def memory_allocated(self, device: Any = None) -> int:
        """Return the resident bytes of this process."""
        return process_memory()[0]

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak since :meth:`reset_peak_memory_stats`."""
        return process_memory()[1]

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Restart the peak from what is used now, if the system allows it."""
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def get_accelerator() -> Accelerator:
    """Return the interface to the device of this process: its own GPU if there is one, else the CPU."""
    device = own_device(default_device())
    return Accelerator(device) if device.type == "cuda" else CpuAccelerator(device)


def get_current_device() -> torch.device:
    """Return this process's GPU, or the CPU."""
    return get_accelerator().get_current_device()
