"""Streams, events, copies beside the host and which GPU they are of: always asked for by device.

Torch answers what no device is named for with the *current* one, of the thread that asks: GPU 0 in a thread that was
just started, and whatever the program chose last elsewhere, which need not be where the model is. A wait on the wrong
GPU's stream waits for nothing, and the numbers are wrong without a word. So everything here takes a device, and
``tests/test_architecture.py`` keeps the rest of the library from asking by itself.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from shardwise.core.base.device.runtime import Runtime, runtime

__all__ = [
    "Lent",
    "RandomState",
    "SideCopy",
    "behind_current",
    "copy_ahead",
    "default_generator",
    "give_back",
    "is_page_locked",
    "make_current",
    "numbered",
    "on_device",
    "on_stream",
    "page_lock",
    "page_locked",
    "random_state",
    "record_event",
    "recorded",
    "sent_ahead",
    "set_random_state",
    "side_stream",
    "synchronize",
    "total_bytes",
    "wait_event",
]

RandomState = tuple[torch.Tensor, torch.Tensor | None]
"""Of the CPU's generator, and of a GPU's."""


def numbered(device: torch.device) -> torch.device:
    """``device`` as tensors on it name it: of a GPU without a number, the current one of this thread."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", runtime().current_device())


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, ``device`` is this thread's current one, where it is a GPU."""
    return runtime().on_device(device) if device.type == "cuda" else contextlib.nullcontext()


def make_current(device: torch.device) -> None:
    """From here on ``device`` is this thread's current one, where it is a GPU. For the first line of a thread."""
    if device.type == "cuda":
        runtime().make_current(device)


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    """Of a GPU: the stream that operations of this thread on its tensors run on."""
    return runtime().current_stream(device)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A new stream of a GPU; ``None`` of any other device."""
    return runtime().new_stream(device) if device.type == "cuda" else None


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Inside the block work of its GPU goes to ``stream``; nothing changes for ``None``."""
    return runtime().on_stream(stream) if stream is not None else contextlib.nullcontext()


@contextlib.contextmanager
def behind_current(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """Inside the block a GPU's work goes to ``stream``, behind all that its current stream was given before."""
    stream.wait_stream(_current_stream(device))
    with runtime().on_stream(stream):
        yield


def record_event(device: torch.device) -> torch.cuda.Event:
    """An event of a GPU that happens when its current stream has done what it was given so far."""
    event: torch.cuda.Event = _current_stream(device).record_event()
    return event


def wait_event(device: torch.device, event: torch.cuda.Event) -> None:
    """What is given to the current stream of a GPU from here on waits for ``event``; the host does not."""
    _current_stream(device).wait_event(event)


def synchronize(device: torch.device) -> None:
    """The host waits until a GPU has done all it was given; nothing to do for other devices."""
    if device.type == "cuda":
        runtime().synchronize(device)


def give_back(device: torch.device) -> None:
    """A GPU gets the memory back that torch keeps of it without using it; nothing to do for other devices."""
    if device.type == "cuda":
        runtime().empty_cache(device)


def total_bytes(device: torch.device) -> int:
    """The memory that a GPU has."""
    return runtime().total_bytes(device)


def random_state(device: torch.device) -> RandomState:
    """Of the CPU's generator and, where ``device`` is a GPU, of its own."""
    return torch.get_rng_state(), runtime().random_state(device) if device.type == "cuda" else None


def default_generator(device: torch.device) -> torch.Generator:
    """The global generator of ``device`` (the current one of its type where it has no number)."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        return runtime().generator(device)
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def set_random_state(device: torch.device, state: RandomState) -> None:
    """What :func:`random_state` gave for ``device``."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        runtime().set_random_state(device, state[1])


def page_lock(block: torch.Tensor, device: torch.device) -> None:
    """Page-lock host memory, as long as it lives, so that copies between it and a GPU run beside the host.

    Raises:
        RuntimeError: CUDA refuses to page-lock that much.
    """
    result = runtime().lock_pages(block, device)
    if result != 0:
        raise RuntimeError(
            f"CUDA could not page-lock {block.numel()} bytes of host memory (error {result}); raise the limit of "
            "locked memory (ulimit -l), or use pin_memory=False"
        )
    weakref.finalize(block.untyped_storage(), _unlock, runtime(), block.data_ptr(), device, os.getpid())


def _unlock(locked_by: Runtime, address: int, device: torch.device, process: int) -> None:
    """The memory at ``address`` is about to be given back: no copy may still read or write it."""
    if os.getpid() != process:
        return  # a forked child, which may not speak to CUDA and has locked nothing
    locked_by.synchronize(device)
    locked_by.unlock_pages(address, device)


def page_locked(shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory with any content. Torch keeps it, once dropped, from others until copies are done."""
    return runtime().pinned(shape, dtype)


def is_page_locked(tensor: torch.Tensor) -> bool:
    """Whether copies between ``tensor``, of the host, and a GPU run beside the host."""
    return runtime().is_pinned(tensor)


def copy_ahead(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue a copy on the current stream, between a GPU and page-locked memory without waiting for it.

    Nobody may write ``source`` or use ``target`` before it is done, but what the stream is given later.
    """
    target.copy_(source, non_blocking=True)


def sent_ahead(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of ``source`` on ``device``, as :func:`copy_ahead` makes it; ``source`` itself where it is there."""
    return source.to(device, non_blocking=True)


class Lent:
    """Memory that other streams use while its own goes on: kept until somebody has waited for them.

    Args:
        tensors: of a GPU, allocated on its current stream.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors, self._owner = tensors, _current_stream(tensors[0].device)

    def drop(self) -> None:
        """The current stream waits for all that use it. Where another one gets the memory, that has not waited."""
        for tensor in self._tensors:
            if (current := _current_stream(tensor.device)) != self._owner:
                recorded(tensor, current)
        self._tensors = ()


def recorded(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Once dropped, the memory of ``tensor`` is not used again before what ``stream`` has been given by then."""
    runtime().record_stream(tensor, stream)


class SideCopy:
    """A copy from the host's memory to a GPU on a stream of its own; what it makes is usable after :meth:`wait`.

    ``out`` may be dropped at any time after :meth:`wait`, without ``record_stream``, and its memory is not written by
    this copy then: the allocator gives memory that was dropped to the stream that it was allocated on, which is the one
    that was current when the copy was begun, and :meth:`wait` makes that stream wait for the copy. Whoever drops
    ``out`` must have called it. ``record_stream`` would keep the memory from being used again until the *host* finds
    the copy done, so that a host which runs ahead allocates more and more, which ``memory_allocated`` does not count.

    Args:
        source: host memory; it must live, and keep its values, until the copy is done. For the copy to run beside
            anything it has to be page-locked.
        out: on a GPU, just allocated there or not used by anything that the current stream does not wait for.
        stream: of the same GPU.
    """

    def __init__(self, source: torch.Tensor, out: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._out, self._source = out, source
        self._owner = _current_stream(out.device)
        stream.wait_stream(self._owner)  # for whoever used this memory before
        with runtime().on_stream(stream):
            copy_ahead(out, source)
            self._event = stream.record_event()

    def finished(self) -> bool:
        """Whether the copy is done."""
        return bool(self._event.query())

    def wait(self) -> None:
        """What the current stream is given from here on comes after the copy; the host does not wait."""
        reader = _current_stream(self._out.device)
        reader.wait_event(self._event)
        if reader != self._owner:  # the program has changed streams since; its owner gets it after this one
            recorded(self._out, reader)
