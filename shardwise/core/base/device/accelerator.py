"""The device of a program by one interface, whether it is a GPU or the CPU."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.base.checked import as_kind
from shardwise.core.base.device.gpus import visible_gpus
from shardwise.core.base.device.memory import memory_facts, reset_peak
from shardwise.core.base.device.runtime import runtime
from shardwise.core.base.device.streams import give_back, make_current, numbered, synchronize

__all__ = ["Accelerator"]


class Accelerator:
    """What a program asks of its device. What is not named here is that of ``torch.cuda``, or of ``torch.cpu``.

    On the CPU memory is that of the process, there are no caches to empty, and nothing has to be waited for.

    Attributes:
        device: which it is.
        name: ``"cuda"`` or ``"cpu"``.
        communication_backend: between such devices: ``"nccl"`` or ``"gloo"``.
        support_set_device: whether there are several to choose from.
    """

    is_synchronous = False

    def __init__(self, device: torch.device) -> None:
        as_kind("device", device, torch.device, "a torch.device")
        self.device, self.name = device, device.type
        self.support_set_device = device.type == "cuda"
        self.communication_backend = "nccl" if device.type == "cuda" else "gloo"
        self._torch: Any = torch.cuda if device.type == "cuda" else torch.cpu

    def __repr__(self) -> str:
        return f"Accelerator({str(self.device)!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._torch, name)
        except AttributeError:
            raise AttributeError(
                f"{name!r} of {self.name}: {self._torch.__name__} has no such thing; ask a GPU, or leave it out here",
                name=name,
                obj=self,
            ) from None

    # -- the device

    def get_version(self) -> str:
        """Of CUDA; empty on the CPU."""
        return str(torch.version.cuda or "") if self.name == "cuda" else ""

    def get_current_device(self) -> torch.device:
        """With its number, where it is a GPU: the current one."""
        return numbered(torch.device("cuda")) if self.name == "cuda" else self.device

    def current_device(self) -> int:
        """Its number; 0 on the CPU."""
        return self.get_current_device().index or 0

    def set_device(self, device: torch.device | int | None = None) -> None:
        """Choose the current GPU; ``None``: the rank's own. On the CPU there is nothing to choose."""
        if self.name == "cuda":
            make_current(torch.device("cuda", device) if isinstance(device, int) else device or self.device)

    def is_available(self) -> bool:
        """Whether it can be used."""
        return self.name == "cpu" or visible_gpus() > 0

    def device_count(self) -> int:
        """GPUs that this process sees; 1 on the CPU."""
        return visible_gpus() if self.name == "cuda" else 1

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Wait for what the device was given to do."""
        synchronize(self._asked(device))

    def _asked(self, device: torch.device | int | str | None) -> torch.device:
        if device is None:
            return self.get_current_device()
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)

    # -- random numbers

    def get_rng_state(self, device: torch.device | int | str | None = None) -> torch.Tensor:
        """The state of its generator."""
        return runtime().random_state(self._asked(device)) if self.name == "cuda" else torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: torch.device | int | str | None = None) -> None:
        """Go on from a state of its generator."""
        if self.name == "cuda":
            runtime().set_random_state(self._asked(device), new_state)
        else:
            torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> None:
        """Start its generator from ``seed``."""
        self._random().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Start the generators of all such devices from ``seed``."""
        (torch.cuda.manual_seed_all if self.name == "cuda" else torch.manual_seed)(seed)

    def initial_seed(self) -> int:
        """What its generator was started from."""
        return int(self._random().initial_seed())

    def _random(self) -> Any:
        return torch.cuda if self.name == "cuda" else torch.random

    # -- memory, in bytes

    def empty_cache(self) -> None:
        """Give back what the allocator keeps for later."""
        if self.name == "cuda":
            give_back(self.get_current_device())

    def memory_allocated(self, device: torch.device | int | None = None) -> int:
        """By tensors on a GPU now; on the CPU by this process."""
        facts = memory_facts(self._asked(device))
        return facts.device_bytes if self.name == "cuda" else facts.rss_bytes

    def max_memory_allocated(self, device: torch.device | int | None = None) -> int:
        """The most since :meth:`reset_peak_memory_stats`."""
        facts = memory_facts(self._asked(device))
        return facts.peak_device_bytes if self.name == "cuda" else facts.peak_rss_bytes

    def memory_reserved(self, device: torch.device | int | None = None) -> int:
        """As :meth:`memory_allocated`, with what the allocator keeps for later."""
        return runtime().reserved_bytes(self._asked(device))[0] if self.name == "cuda" else self.memory_allocated()

    def max_memory_reserved(self, device: torch.device | int | None = None) -> int:
        """The most of :meth:`memory_reserved`."""
        asked = self._asked(device)
        return runtime().reserved_bytes(asked)[1] if self.name == "cuda" else self.max_memory_allocated()

    def reset_peak_memory_stats(self, device: torch.device | int | None = None) -> None:
        """Start the most from what is used now."""
        reset_peak(self._asked(device))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    # -- 16 bits

    def autocast(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> Any:
        """``torch.amp.autocast`` for this device."""
        return torch.amp.autocast(self.name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
