"""A simulated CUDA with two GPUs that computes nothing: stream order, current GPUs, and bytes of an allocator.

It replaces functions of ``torch.cuda``. A call without a device gets the calling thread's current GPU, as in torch, so
a test can detect code that forgets to pass one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch


@dataclass(eq=False)
class Stream:
    """Records its copies by name and the events that it waits for, in order."""

    cuda: FakeCuda
    device: int
    given: list[object] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self.given.append(event)

    def record_event(self) -> Event:
        return Event(self, len(self.given))

    def comes_after(self, work: object) -> bool:
        """Return whether later work on this stream waits for ``work``, on this stream or through events."""
        return _reaches(self, len(self.given), work)


@dataclass(frozen=True)
class Event:
    """The first ``count`` entries of ``stream``."""

    stream: Stream
    count: int

    def query(self) -> bool:
        return False


def _reaches(stream: Stream, count: int, work: object) -> bool:
    return any(
        each is work or (isinstance(each, Event) and _reaches(each.stream, each.count, work))
        for each in stream.given[:count]
    )


class FakeArray:
    """A tensor on a GPU, allocated on the stream that was current."""

    def __init__(self, cuda: FakeCuda, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.owner = cuda.stream_of(index)
        self.readers: list[Stream] = []
        self._cuda = cuda

    def copy_(self, source: object, non_blocking: bool = False) -> None:
        assert self._cuda.current == self.device.index and non_blocking
        self._cuda.stream_of(self.device.index).given.append(source)

    def record_stream(self, stream: Stream) -> None:
        self.readers.append(stream)


class FakeCuda:
    """The simulated functions of ``torch.cuda``.

    Attributes:
        allocated, waiting, peak: bytes of the allocator; freed memory that waits for a stream is in neither of torch's
            own numbers.
        resets: how often the allocator's peak was reset.
        locked: by address, the GPU that was current when host memory was page-locked; ``ever_locked_on``: all of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._here = threading.local()
        self._streams = {index: Stream(self, index) for index in range(2)}
        self.allocated = self.waiting = self.peak = self.resets = 0
        self.model: Callable[[], int] = lambda: 0
        """Returns further allocated bytes."""
        self.locked: dict[int, int] = {}
        self.ever_locked_on: set[int] = set()
        self.synchronized: list[int] = []
        for name in ("current_stream", "synchronize", "set_device", "device", "stream", "cudart", "current_device"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, self._index(device)))
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self._stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    # ---- streams and the current GPU

    @property
    def current(self) -> int:
        """Return the calling thread's GPU."""
        return getattr(self._here, "device", 0)

    def stream_of(self, index: int) -> Stream:
        """Return the GPU's current stream."""
        return self._streams[index]

    def change_stream(self, index: int) -> Stream:
        """Make another stream of that GPU current."""
        self._streams[index] = Stream(self, index)
        return self._streams[index]

    def _index(self, device: Any) -> int:
        index = device if isinstance(device, int) else device.index if device is not None else None
        return self.current if index is None else index

    def _current_stream(self, device: Any = None) -> Stream:
        return self.stream_of(self._index(device))

    def _current_device(self) -> int:
        return self.current

    def _set_device(self, device: Any) -> None:
        self._here.device = self._index(device)

    def _synchronize(self, device: Any = None) -> None:
        self.synchronized.append(self._index(device))

    @contextmanager
    def _device(self, device: Any) -> Iterator[None]:
        before, self._here.device = self.current, self._index(device)
        try:
            yield
        finally:
            self._here.device = before

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        before, self._streams[stream.device] = self._streams[stream.device], stream
        with self._device(stream.device):
            yield
        self._streams[stream.device] = before

    # ---- memory

    def _cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.locked[address] = self.current
        self.ever_locked_on.add(self.current)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert self.synchronized, "a copy may still use it"
        assert self.locked.pop(address) == self.current
        return 0

    def allocate(self, size: int) -> None:
        """Allocate a tensor of that many bytes, or free it (negative)."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated + self.waiting + self.model())

    def drop_recorded(self, size: int) -> None:
        """Free a tensor that another stream may still use."""
        self.allocated -= size
        self.waiting += size

    def _stats(self, device: Any = None) -> dict[str, Any]:
        active = self.allocated + self.waiting + self.model()
        self.peak = max(self.peak, active)
        return {
            "allocated_bytes": {"all": {"current": active - self.waiting, "peak": active - self.waiting}},
            "active_bytes": {"all": {"current": active, "peak": self.peak}},
        }

    def _reset(self, device: Any = None) -> None:
        self.resets += 1
        self.peak = self.allocated + self.waiting + self.model()
