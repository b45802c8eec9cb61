"""Devices: the runtime of GPUs, streams and events, page-locked memory, memory in use, and which GPUs there are.

For a call that names no device, torch uses the *current* device of the calling thread: GPU 0 in a new thread, elsewhere
the last choice of the program, which need not be the model's device. A wait on the wrong GPU's stream waits for
nothing, and the numbers are silently wrong. Every function here therefore takes a device, and
``tests/test_architecture.py`` keeps the rest of the library from calling ``torch.cuda`` directly.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from glob import glob
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

RandomState = tuple[Tensor, Tensor | None]
"""The state of the CPU's generator, and of a GPU's generator."""

# ---- the runtime


class Runtime:
    """The interface through which this library uses ``torch.cuda``.

    It is the only interface between the library and GPUs. Tests replace it (:func:`replace_runtime`) with a device
    whose streams are as late as possible (``tests/support/late``). Operations on tensors use torch's dispatcher.

    Attributes:
        of_process: the runtime that :func:`runtime` returns.
    """

    of_process: ClassVar[Runtime]

    def device_count(self) -> int:
        """Return the number of GPUs that this process can use."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def identity(self, index: int) -> tuple[str, str | None]:
        """Return a GPU's name and its UUID, or ``None`` if the driver gives no UUID."""
        facts = torch.cuda.get_device_properties(index)
        return facts.name, getattr(facts, "uuid", None)

    def current_device(self) -> int:
        """Return the index of this thread's current GPU."""
        return torch.cuda.current_device()

    def make_current(self, device: torch.device) -> None:
        """Make ``device`` this thread's current GPU."""
        torch.cuda.set_device(device)

    def on_device(self, device: torch.device) -> AbstractContextManager[object]:
        """Make ``device`` this thread's current GPU inside the block."""
        return torch.cuda.device(device)

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return this thread's current stream of a GPU."""
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return a stream from torch's pool, which waits for no other stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Send this thread's work to ``stream`` inside the block."""
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Prevent reuse of the memory of ``tensor`` until ``stream`` has done its current work (``record_stream``)."""
        tensor.record_stream(stream)

    def synchronize(self, device: torch.device) -> None:
        """Make the host wait for all streams of a GPU."""
        torch.cuda.synchronize(device)

    def empty_cache(self, device: torch.device) -> None:
        """Return unused memory of the allocator to the driver. Torch checks only streams of the current device."""
        with torch.cuda.device(device):
            torch.cuda.empty_cache()

    def total_bytes(self, device: torch.device) -> int:
        """Return the memory of a GPU."""
        return int(torch.cuda.get_device_properties(device).total_memory)

    def memory_stats(self, device: torch.device) -> dict[str, Any]:
        """Return the allocator's statistics, nested by name; empty before its first allocation."""
        return dict(torch.cuda.memory_stats_as_nested_dict(device))

    def reset_peak(self, device: torch.device) -> None:
        """Reset all peaks that torch counts, and that of :func:`allocator_bytes`."""
        torch.cuda.reset_peak_memory_stats(device)

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return uninitialized page-locked memory from torch's pool, which reuses it only after copies are done."""
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether host memory is page-locked, so that copies between it and a GPU are asynchronous."""
        return tensor.is_pinned()

    def lock_pages(self, block: Tensor, device: torch.device) -> int:
        """Page-lock existing memory; return 0, or the number of an error.

        The GPU is an argument, since the thread's current GPU could otherwise get a context of hundreds of megabytes.
        """
        library = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            return int(library.cudaHostRegister(block.data_ptr(), block.numel(), 0))

    def unlock_pages(self, address: int, device: torch.device) -> None:
        """Undo :meth:`lock_pages` for the memory at ``address``."""
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state of the GPU's generator, on the CPU."""
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, device: torch.device, state: Tensor) -> None:
        """Set the state of the GPU's generator."""
        torch.cuda.set_rng_state(state, device)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the GPU's default generator; this initializes CUDA, since the generator does not exist before."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return cast(torch.Generator, torch.cuda.default_generators[index])  # type: ignore[redundant-cast]


Runtime.of_process = Runtime()


def runtime() -> Runtime:
    """Return the runtime of this process's GPUs."""
    return Runtime.of_process


def replace_runtime(new: Runtime) -> Runtime:
    """Install ``new`` as the runtime and return the previous one. For tests, before anything is on a device."""
    before, Runtime.of_process = Runtime.of_process, new
    return before


# ---- devices, streams and events


def numbered(device: torch.device) -> torch.device:
    """Return ``device`` with an index: a GPU without one gets that of the thread's current GPU, as tensors do."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", runtime().current_device())


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device``, if it is a GPU, this thread's current device inside the block."""
    return runtime().on_device(device) if device.type == "cuda" else contextlib.nullcontext()


def make_current(device: torch.device) -> None:
    """Make ``device``, if it is a GPU, this thread's current device. For the first line of a thread."""
    if device.type == "cuda":
        runtime().make_current(device)


def runs_ahead(device: torch.device) -> bool:
    """Return whether work on ``device`` is asynchronous, so that reading a value waits for all queued work."""
    return device.type != "cpu"


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that this thread's operations on a GPU's tensors run on."""
    return runtime().current_stream(device)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return a new stream of a GPU, or ``None`` for any other device."""
    return runtime().new_stream(device) if device.type == "cuda" else None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Send the work of the stream's GPU to ``stream`` inside the block; ``None`` changes nothing."""
    return runtime().on_stream(stream) if stream is not None else contextlib.nullcontext()


@contextlib.contextmanager
def behind_current(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """Send a GPU's work to ``stream`` inside the block, after the work that is in its current stream by now."""
    stream.wait_stream(current_stream(device))
    with runtime().on_stream(stream):
        yield


def record_event(device: torch.device) -> torch.cuda.Event:
    """Return an event that completes when the GPU's current stream has done its work so far."""
    event: torch.cuda.Event = current_stream(device).record_event()
    return event


def wait_event(device: torch.device, event: torch.cuda.Event) -> None:
    """Make later work of the GPU's current stream wait for ``event``; the host does not wait."""
    current_stream(device).wait_event(event)


def synchronize(device: torch.device) -> None:
    """Make the host wait until a GPU has done all its work; does nothing for other devices."""
    if device.type == "cuda":
        runtime().synchronize(device)


def give_back(device: torch.device) -> None:
    """Release GPU memory that torch caches without using it. No effect on other devices."""
    if device.type == "cuda":
        runtime().empty_cache(device)


# ---- random numbers


def random_state(device: torch.device) -> RandomState:
    """Return the state of the CPU's generator and, if ``device`` is a GPU, that of the GPU's generator."""
    return torch.get_rng_state(), runtime().random_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: RandomState) -> None:
    """Set the states that :func:`random_state` returned for ``device``."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        runtime().set_random_state(device, state[1])


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of ``device`` (of the current device of its type if it has no index)."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return runtime().generator(device)
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


# ---- page-locked memory and asynchronous copies


def page_lock(block: Tensor, device: torch.device) -> None:
    """Page-lock host memory for as long as it lives, so that copies between it and a GPU are asynchronous.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """
    result = runtime().lock_pages(block, device)
    if result != 0:
        raise RuntimeError(
            f"CUDA could not page-lock {block.numel()} bytes of host memory (error {result}). Raise the limit of "
            "locked memory (ulimit -l), or use pin_memory=False"
        )
    weakref.finalize(block.untyped_storage(), _unlock, runtime(), block.data_ptr(), device, os.getpid())


def _unlock(locked_by: Runtime, address: int, device: torch.device, process: int) -> None:
    """Unlock memory that is about to be freed, once no copy reads or writes it."""
    if os.getpid() != process:
        return  # a forked child must not call CUDA, and has locked nothing
    locked_by.synchronize(device)
    locked_by.unlock_pages(address, device)


def page_locked(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return uninitialized page-locked host memory. Torch reuses it only after copies that use it are done."""
    return runtime().pinned(shape, dtype)


def is_page_locked(tensor: Tensor) -> bool:
    """Return whether copies between ``tensor``, on the host, and a GPU are asynchronous."""
    return runtime().is_pinned(tensor)


def copy_ahead(target: Tensor, source: Tensor) -> None:
    """Queue a copy on the current stream; between a GPU and page-locked memory the host does not wait for it.

    Until the copy is done, only later work of the same stream may write ``source`` or use ``target``.
    """
    target.copy_(source, non_blocking=True)


def sent_ahead(source: Tensor, device: torch.device) -> Tensor:
    """Return a copy of ``source`` on ``device``, made as by :func:`copy_ahead`, or ``source`` if it is there."""
    return source.to(device, non_blocking=True)


class Lent:
    """Keeps memory that other streams use until the current stream has waited for them.

    Args:
        tensors: GPU tensors that were allocated on the current stream.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors, self._owner = tensors, current_stream(tensors[0].device)

    def drop(self) -> None:
        """Drop the memory; the current stream has waited for its users.

        If the current stream is not the one that the memory was allocated on, the allocator is made to wait for it.
        """
        for tensor in self._tensors:
            if (current := current_stream(tensor.device)) != self._owner:
                recorded(tensor, current)
        self._tensors = ()


def recorded(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Prevent reuse of the memory of ``tensor`` until ``stream`` has done the work queued when it is dropped."""
    runtime().record_stream(tensor, stream)


class SideCopy:
    """A copy from host memory to a GPU on a separate stream; the result is usable after :meth:`wait`.

    ``out`` may be dropped at any time after :meth:`wait`, without ``record_stream``: the allocator returns dropped
    memory to the stream that it was allocated on, which is the current one when the copy begins, and :meth:`wait` makes
    that stream wait for the copy. ``record_stream`` would instead prevent reuse of the memory until the *host* sees
    that the copy is done, so a host that runs ahead would allocate more and more, which ``memory_allocated`` does not
    count.

    Args:
        source: host memory; it must stay alive and unchanged until the copy is done. Only page-locked memory is copied
            asynchronously.
        out: tensor on a GPU; just allocated, or used only by work that the current stream waits for.
        stream: a stream of the same GPU.
    """

    def __init__(self, source: Tensor, out: Tensor, stream: torch.cuda.Stream) -> None:
        self._out, self._source = out, source
        self._owner = current_stream(out.device)
        stream.wait_stream(self._owner)  # for earlier users of this memory
        with runtime().on_stream(stream):
            copy_ahead(out, source)
            self._event = stream.record_event()

    def wait(self) -> None:
        """Make later work of the current stream wait for the copy; the host does not wait."""
        reader = current_stream(self._out.device)
        reader.wait_event(self._event)
        if reader != self._owner:  # the program has changed streams: the owner reuses the memory after this stream
            recorded(self._out, reader)


class Later:
    """A copy of a value from a device to the host, in progress.

    Args:
        value: a tensor of one element; later writes to it have no effect.
    """

    def __init__(self, value: Tensor) -> None:
        on_gpu = value.is_cuda
        self._host = page_locked(value.shape, value.dtype) if on_gpu else torch.empty_like(value, device="cpu")
        copy_ahead(self._host, value)
        self._arrived = record_event(value.device) if on_gpu else None

    def value(self) -> bool | float:
        """Return the value; waits only for work that was queued before this object was created."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.item()


# ---- memory in use


def process_memory() -> tuple[int, int]:
    """Return the resident bytes of this process now (0 if the system does not report them), and their peak."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    now, peak = (int(fields.get(name, "0").split()[0]) for name in ("VmRSS", "VmHWM"))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
    return now * 1024, (peak or own) * 1024


def allocator_bytes(device: torch.device) -> tuple[int, int]:
    """Return the caching allocator's bytes for tensors of a GPU now, and the peak since the last reset.

    This includes memory that was dropped and waits for another stream (``record_stream``), which cannot be allocated
    and which torch's ``memory_allocated`` leaves out.
    """
    stats = runtime().memory_stats(device)
    if not stats:
        return 0, 0  # nothing was allocated there
    kinds = [stats[kind]["all"] for kind in ("active_bytes", "allocated_bytes")]  # other allocators have only one
    return max(kind["current"] for kind in kinds), max(kind["peak"] for kind in kinds)


# ---- which GPUs there are


def visible_gpus() -> int:
    """Return how many GPUs torch can use in this process."""
    return runtime().device_count()


def gpus_of_host() -> int:
    """Return how many NVIDIA GPUs are visible to this process, whether torch can use them or not."""
    return len(glob("/dev/nvidia[0-9]*"))


def gpu_identity(index: int, visible: str | None) -> str | None:
    """Return an identity of GPU ``index`` of this process that is unique over all hosts, or ``None`` if it has none.

    Args:
        index: torch's index.
        visible: ``CUDA_VISIBLE_DEVICES``. MIG slices of one GPU are identified by their names there, since CUDA may
            give all of them the UUID of the whole GPU.
    """
    entries = [entry.strip() for entry in (visible or "").split(",")]
    if index < len(entries) and entries[index].startswith("MIG"):
        return entries[index]
    name, uuid = runtime().identity(index)
    if "MIG" in name:
        return None
    return None if uuid is None else f"GPU-{uuid}"
