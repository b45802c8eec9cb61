"""``get_accelerator()``: what programs ask of the device that this process computes on."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardwise.device import (
    allocator_bytes,
    default_generator,
    is_page_locked,
    make_current,
    memory_facts,
    on_device,
    page_locked,
    synchronize,
    total_bytes,
    visible_gpus,
)
from shardwise.mesh import LaunchFacts, default_device

__all__ = [
    "Accelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "see_memory_usage",
    "set_accelerator",
]

Index = int | None


class Accelerator:
    """The GPU of this rank where every rank has one, else the CPU. Where a method takes ``device_index``, ``None`` is
    this rank's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name = device.type

    def __repr__(self) -> str:
        return f"Accelerator({self._device})"

    def _of(self, index: Index) -> torch.device:
        return self._device if index is None or self._name == "cpu" else torch.device(self._name, index)

    # ---- which device

    def device_name(self, device_index: Index = None) -> str:
        """``"cpu"``, ``"cuda"`` or, with a number, ``"cuda:1"``."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: Index = None) -> AbstractContextManager[object]:
        """A context in which that device is the current one."""
        return nullcontext() if device_index is None else on_device(self._of(device_index))

    def set_device(self, device_index: int) -> None:
        """Make it this process' device."""
        self._device = self._of(device_index)
        make_current(self._device)

    def current_device(self) -> int | str:
        """Its number; ``"cpu"`` on one."""
        return self._device.index or 0 if self._name != "cpu" else "cpu"

    def current_device_name(self) -> str:
        """Such as ``"cuda:0"``."""
        return str(self._device)

    def device_count(self) -> int:
        """GPUs that this process sees; on a CPU the processes of this host, each of which computes on its own."""
        return visible_gpus() if self._name != "cpu" else LaunchFacts.read().local_world_size

    def is_available(self) -> bool:
        """True: there is always one."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether it is on a device of this kind."""
        return tensor.device.type == self._name

    def synchronize(self, device_index: Index = None) -> None:
        """Wait for what runs there."""
        synchronize(self._of(device_index))

    def communication_backend_name(self) -> str:
        """Of ``torch.distributed``."""
        return "gloo" if self._name == "cpu" else "nccl"

    def is_synchronized_device(self) -> bool:
        """Whether an operation is over when its call returns."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    # ---- numbers

    def is_bf16_supported(self) -> bool:
        """True."""
        return True

    def is_fp16_supported(self) -> bool:
        """True: torch computes in fp16 on CPUs as well."""
        return True

    def is_triton_supported(self) -> bool:
        """False: nothing here is written in it."""
        return False

    def supported_dtypes(self) -> list[torch.dtype]:
        """That models can be trained in."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def random(self) -> Any:
        """``torch.random``."""
        return torch.random

    def manual_seed(self, seed: int) -> torch.Generator:
        """``torch.manual_seed``, which is for every device."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Of the device's generator."""
        return self.default_generator().initial_seed()

    def default_generator(self, device_index: Index = None) -> torch.Generator:
        """The device's."""
        return default_generator(self._of(device_index))

    def get_rng_state(self, device_index: Index = None) -> torch.Tensor:
        """Of the device's generator."""
        return self.default_generator(device_index).get_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: Index = None) -> None:
        """What :meth:`get_rng_state` gave."""
        self.default_generator(device_index).set_state(new_state)

    # ---- memory, in bytes

    def memory_allocated(self, device_index: Index = None) -> int:
        """That the allocator has given out; on a CPU what this process holds."""
        if self._name == "cpu":
            return memory_facts().rss_bytes
        return allocator_bytes(self._of(device_index))[0]

    def max_memory_allocated(self, device_index: Index = None) -> int:
        """The most of :meth:`memory_allocated` so far."""
        if self._name == "cpu":
            return memory_facts().peak_rss_bytes
        return allocator_bytes(self._of(device_index))[1]

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated

    def total_memory(self, device_index: Index = None) -> int:
        """Of the device; of the host, on a CPU."""
        if self._name == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total_bytes(self._of(device_index))

    def empty_cache(self) -> None:
        """Nothing: freed blocks are used again."""

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Nothing: there is no profiler to tell."""

    def range_pop(self, domain: Any = None) -> None:
        """Nothing."""

    def lazy_call(self, callback: Any) -> None:
        """Call it."""
        callback()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Page-locked, where there is a GPU."""
        if self._name == "cpu" or is_page_locked(tensor):
            return tensor
        return page_locked(tensor.shape, tensor.dtype).copy_(tensor)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it is page-locked."""
        return is_page_locked(tensor)

    def get_compile_backend(self) -> str:
        """Of ``torch.compile``."""
        return "inductor"


@functools.cache
def get_accelerator() -> Accelerator:
    """The one of this process."""
    return Accelerator(default_device())


def is_current_accelerator_supported() -> bool:
    """True: CPUs and CUDA."""
    return get_accelerator().is_available()


def set_accelerator(accel_obj: Any) -> None:
    """Nothing but a check: devices are those of torch.

    Raises:
        NotImplementedError: it is for another kind of device than this process has.
    """
    name = accel_obj.device_name()
    if name.split(":")[0] != get_accelerator().device_name():
        raise NotImplementedError(
            f"set_accelerator({accel_obj!r:.80}) for {name!r}: this process computes on {get_accelerator()}; choose "
            "with CUDA_VISIBLE_DEVICES"
        )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print ``message`` and what this process holds, on the first rank, where ``force``."""
    if not force or LaunchFacts.read().rank:
        return
    facts, device = memory_facts(), get_accelerator()
    print(f"{message}: {device.memory_allocated():,} bytes on {device}, {facts.rss_bytes:,} resident", flush=True)
