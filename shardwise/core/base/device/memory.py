"""How much memory this process uses, and how much a set of tensors holds. Sizes in bytes."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.core.base.device.runtime import runtime

__all__ = ["MemoryFacts", "allocator_bytes", "live_bytes", "memory_facts", "reset_allocator_peak", "reset_peak"]


@dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """Memory of this process in bytes.

    Attributes:
        rss_bytes: resident now. Shared memory counts in every process that has touched it.
        peak_rss_bytes: the most that was resident since the start (or :func:`reset_peak`).
        pss_bytes: resident now, with shared pages divided by the number of processes that map them; sums over ranks
            to what the host really holds. 0 where the system does not tell.
        device_bytes: allocated on the CUDA device now; 0 on CPU.
        peak_device_bytes: the most that was allocated on it; 0 on CPU.
    """

    rss_bytes: int
    peak_rss_bytes: int
    pss_bytes: int
    device_bytes: int
    peak_device_bytes: int


def memory_facts(device: torch.device | None = None) -> MemoryFacts:
    """This process now; ``device`` is the CUDA device to ask about."""
    status = _fields("/proc/self/status")
    on_gpu = runtime().allocated_bytes(device) if device is not None and device.type == "cuda" else (0, 0)
    return MemoryFacts(
        rss_bytes=status.get("VmRSS", 0),
        peak_rss_bytes=status.get("VmHWM", 0) or _peak_from_rusage(),
        pss_bytes=_fields("/proc/self/smaps_rollup").get("Pss", 0),
        device_bytes=on_gpu[0],
        peak_device_bytes=on_gpu[1],
    )


def reset_peak(device: torch.device | None = None) -> None:
    """Start the peaks from what is used now. The host's peak stays where the system does not allow it."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    if device is not None and device.type == "cuda":
        reset_allocator_peak(device)


def allocator_bytes(device: torch.device) -> tuple[int, int]:
    """What CUDA's caching allocator holds for tensors of a GPU now, and the most since :func:`reset_allocator_peak`.

    With memory that was dropped and waits for another stream (``record_stream``), which is not to be had either and
    which torch's ``memory_allocated`` leaves out. One call for both numbers, without making a flat table of all others.
    """
    found = runtime().memory_stats(device)
    if not found:
        return 0, 0  # nothing has been made there
    kinds = [found[kind]["all"] for kind in ("active_bytes", "allocated_bytes")]  # other allocators know but one
    return max(kind["current"] for kind in kinds), max(kind["peak"] for kind in kinds)


def reset_allocator_peak(device: torch.device) -> None:
    """Let :func:`allocator_bytes` give the most from now on; torch's own peaks start anew with it."""
    runtime().reset_peak(device)


def live_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that the tensors' storages hold, each storage once however many views of it are given."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and tensor.device.type != "meta":
            storages[tensor.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _fields(path: str) -> dict[str, int]:
    """``Name: 123 kB`` lines of a /proc file, in bytes."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB":
                found[name] = int(words[0]) * 1024
    return found


def _peak_from_rusage() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
