"""What the tests and measurements on a GPU count: waits of the host, questions to the allocator, copies that show."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

SYNCHRONIZING = "called a synchronizing CUDA operation"
BIG_BYTES = 2**20


@dataclass
class Count:
    """How often, so far."""

    times: int = 0


@contextlib.contextmanager
def host_waits() -> Iterator[Count]:
    """Counts the operations inside that make the host wait for the GPU, as torch's debug mode knows them.

    It knows copies to memory that is not page-locked, ``item()`` and the like, and no waits for events.
    """
    count = Count()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield count
        finally:
            torch.cuda.set_sync_debug_mode("default")
            count.times = sum(SYNCHRONIZING in str(warning.message) for warning in seen)


@contextlib.contextmanager
def allocator_queries() -> Iterator[Count]:
    """Counts how often the statistics of CUDA's allocator are read or reset inside; each takes 0.1 to 0.3 ms."""
    count = Count()

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            count.times += 1
            return real(*args)

        return ask

    names = ("_cuda_memoryStats", "_cuda_resetPeakMemoryStats", "_cuda_resetAccumulatedMemoryStats")
    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(torch._C, name, counted(getattr(torch._C, name))))
        yield count


@contextlib.contextmanager
def no_current_device() -> Iterator[None]:
    """Inside, the library may ask torch for a stream or wait for a device only by naming the device."""

    def named(real: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("shardwise") and not any(v is not None for v in (*args, *kwargs.values())):
                raise AssertionError(f"{caller} calls {real.__name__}() without a device: another one may be current")
            return real(*args, **kwargs)

        return ask

    with contextlib.ExitStack() as patches:
        for name in ("current_stream", "default_stream", "synchronize"):
            patches.enter_context(mock.patch.object(torch.cuda, name, named(getattr(torch.cuda, name))))
        yield


Span = tuple[float, float]
"""Start and end in microseconds."""


@dataclass
class Kernels:
    """What ran on the GPU in a step: by name, and when."""

    compute: list[Span]
    uploads: list[Span]
    """Copies from the host of at least a MiB, as long as one at 64 GB/s takes."""
    gathers: list[Span]
    reductions: list[Span]

    def hidden(self, spans: list[Span]) -> float:
        """Microseconds of ``spans`` during which something was computed."""
        return sum(max(0.0, min(end, b) - max(start, a)) for start, end in spans for a, b in merged(self.compute))

    def exposed(self, spans: list[Span]) -> int:
        """How many of ``spans`` ran for more than half of their time while nothing was computed."""
        return sum(self.hidden([span]) < 0.5 * (span[1] - span[0]) for span in spans)


def merged(spans: list[Span]) -> list[Span]:
    """Their union, in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def kernels_of(step: Callable[[], None], device: torch.device) -> Kernels:
    """Profile one call of ``step``."""
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize(device)
    found = Kernels([], [], [], [])
    shortest = BIG_BYTES / 64e9 * 1e6
    for event in profile.events():
        if event.device_type.name != "CUDA":
            continue
        name, span = event.name.lower(), (float(event.time_range.start), float(event.time_range.end))
        if "nccl" in name:
            (found.gathers if "gather" in name else found.reductions).append(span)
        elif "memcpy htod" in name:
            found.uploads += [span] if span[1] - span[0] >= shortest else []
        elif "memcpy" not in name and "memset" not in name:
            found.compute.append(span)
    return found
