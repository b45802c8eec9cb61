"""What runs the work of GPUs: ``torch.cuda``, or what a test puts in its place.

The one seam between this library and a device: streams, events, page-locked memory, what the allocator holds, the
state of generators. Operations on tensors reach a device through torch's dispatcher, which a test can also serve.
The tests' late device (``tests/support/late``) does both, with streams that are as late as they may be.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch

__all__ = ["CudaRuntime", "Runtime", "replace_runtime", "runtime"]


class Runtime(Protocol):
    """What a GPU's driver and torch's allocator are asked. Streams and events are as those of ``torch.cuda``."""

    def device_count(self) -> int:
        """GPUs of this process; 0 where none can be used."""

    def identity(self, index: int) -> tuple[str, str | None]:
        """A GPU's name, and what tells it from every other one; ``None`` where nothing does."""

    def current_device(self) -> int:
        """The number of this thread's current one."""

    def make_current(self, device: torch.device) -> None:
        """From here on it is this thread's current one."""

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """Inside the block it is."""

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """What work of this thread on the device goes to."""

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """One that waits for no other."""

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Inside the block work of its device goes to it."""

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """The memory of ``tensor`` is not used again, once dropped, before what ``stream`` has been given by then."""

    def synchronize(self, device: torch.device) -> None:
        """The host waits for all of its streams."""

    def empty_cache(self, device: torch.device) -> None:
        """Memory that no tensor has goes back."""

    def total_bytes(self, device: torch.device) -> int:
        """The memory of a device."""

    def allocated_bytes(self, device: torch.device) -> tuple[int, int]:
        """Of tensors now, and the most."""

    def memory_stats(self, device: torch.device) -> dict[str, Any]:
        """What the allocator counts, nested by name; empty before it has made anything."""

    def reserved_bytes(self, device: torch.device) -> tuple[int, int]:
        """As :meth:`allocated_bytes`, with what is kept for later."""

    def reset_peak(self, device: torch.device) -> None:
        """The most is what there is now."""

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Page-locked host memory with any content; not given to others before copies that were begun are done."""

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether host memory is page-locked."""

    def lock_pages(self, block: torch.Tensor, device: torch.device) -> int:
        """Page-lock memory that there is; 0, or the number of an error."""

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """The memory that begins there is ordinary again."""

    def random_state(self, device: torch.device) -> torch.Tensor:
        """Of the device's generator."""

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """What :meth:`random_state` gave."""

    def generator(self, device: torch.device) -> torch.Generator:
        """The global one of a device."""


class CudaRuntime:
    """``torch.cuda``; see :class:`Runtime`."""

    def device_count(self) -> int:
        """As torch counts."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def identity(self, index: int) -> tuple[str, str | None]:
        """As the driver says."""
        facts = torch.cuda.get_device_properties(index)
        return facts.name, getattr(facts, "uuid", None)

    def current_device(self) -> int:
        """As torch counts."""
        return torch.cuda.current_device()

    def make_current(self, device: torch.device) -> None:
        """For this thread."""
        torch.cuda.set_device(device)

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """For this thread."""
        return torch.cuda.device(device)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Of this thread."""
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """From torch's pool."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """For this thread."""
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """A rule of the caching allocator."""
        tensor.record_stream(stream)

    def synchronize(self, device: torch.device) -> None:
        """All of its streams."""
        torch.cuda.synchronize(device)

    def empty_cache(self, device: torch.device) -> None:
        """Torch asks no device, but the current one's streams."""
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def total_bytes(self, device: torch.device) -> int:
        """As the driver says."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def allocated_bytes(self, device: torch.device) -> tuple[int, int]:
        """As torch counts."""
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)

    def memory_stats(self, device: torch.device) -> dict[str, Any]:
        """Nested, without making a flat table of them."""
        return dict(torch.cuda.memory_stats_as_nested_dict(device))

    def reserved_bytes(self, device: torch.device) -> tuple[int, int]:
        """As torch counts."""
        return torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)

    def reset_peak(self, device: torch.device) -> None:
        """All peaks that torch counts."""
        torch.cuda.reset_peak_memory_stats(device)

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """From torch's pool, which knows of copies that were begun."""
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """As the driver says."""
        return tensor.is_pinned()

    def lock_pages(self, block: torch.Tensor, device: torch.device) -> int:
        """For the GPU by name: a thread's current one would get a context, hundreds of megabytes of it."""
        library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            return int(library.cudaHostRegister(block.data_ptr(), block.numel(), 0))

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """See :meth:`lock_pages`."""
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def random_state(self, device: torch.device) -> torch.Tensor:
        """On the CPU."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        """From the CPU."""
        torch.cuda.set_rng_state(state, device)

    def generator(self, device: torch.device) -> torch.Generator:
        """There is none before CUDA has been started, which this does."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return cast(torch.Generator, torch.cuda.default_generators[index])  # type: ignore[redundant-cast]


class _Present:
    """Which runtime this process has."""

    def __init__(self) -> None:
        self.runtime: Runtime = CudaRuntime()


_PRESENT = _Present()


def runtime() -> Runtime:
    """What runs the work of this process's GPUs."""
    return _PRESENT.runtime


def replace_runtime(new: Runtime) -> Runtime:
    """From here on ``new`` runs it; what did before. For tests alone, and before anything is on a device."""
    before, _PRESENT.runtime = _PRESENT.runtime, new
    return before
