"""Memory of every rank of a group, mapped into every rank of the group.

Each rank creates an anonymous file (memfd), whose pages live as long as a process maps them, so nothing remains even
after SIGKILL. Peers open it through /proc/<pid>/fd. If that is not permitted, a file in /dev/shm is used instead; it is
unlinked as soon as all ranks have opened it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import socket
import struct
import tempfile
from dataclasses import dataclass
from typing import Literal

from shardwise.core.comm.control import Control

Method = Literal["memfd", "file"]

LINE_BYTES = 64
LINE_WORDS = LINE_BYTES // 8
# Checked in a peer's file after mapping, to verify that the path is that of the right file.
MAGIC = 0x53_68_61_72_64_77_69_73
HUGE_PAGE_BYTES = 2 * 1024 * 1024
SHM_FOLDER = "/dev/shm"
MAP_NORESERVE = 0x4000  # x86-64; pages that become private are dropped again soon


class MappingError(RuntimeError):
    """Memory could not be created or mapped. Every rank of the group raises it."""


# [Note: Counters in shared memory]
# Ranks synchronize through counters in shared memory, each with a single writer and in its own cache line. There are no
# locks: a rank writes its data and then its counter, and a rank that sees the counter sees the data. This relies on
# x86-64's order of stores, which is why the machine is checked. A counter only grows, so a late reader misses nothing.
# * A reduction has three counters, with the last operation that this rank has published (its data may be read), reduced
#   (its own slice is summed) and consumed (it no longer reads the peers' data). A buffer may be written again when all
#   ranks have consumed it.
# * A host all-gather has one counter, of arrivals, and two slots for its data, used alternately: a rank that writes a
#   slot again has seen all ranks arrive at the all-gather in between, so no rank reads the slot then.
# * A rank that leaves or fails sets a flag of its own; a killed rank is detected through its process. So a wait ends
#   with an error that names the rank. A rank that abandons a host all-gather writes that to its slot, for late ranks. A
#   rank that failed and then completes a host all-gather with all others resets this.
# While a rank waits, it does its own part of older reductions; otherwise two ranks could wait for each other.
def host_facts() -> dict[str, str]:
    """Return the values that must be equal for ranks to share memory with plain loads and stores; empty if unsupported.

    The counters rely on x86-64's store order: a rank that sees a counter also sees the data written before it.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return {}
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {"boot": boot, "host": socket.gethostname(), "processes": os.readlink("/proc/self/ns/pid")}


def start_time(pid: int) -> int:
    """Return the clock tick at which process ``pid`` started, or -1 if it is gone or a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    # A pid may be reused; together with the start time it is unique.
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    """Return True if the process that had this pid and start time is still running."""
    return start_time(pid) == started


@dataclass
class _Own:
    """This rank's file while the peers open it."""

    fd: int
    path: str
    error: str = ""

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        if self.path.startswith(SHM_FOLDER):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def map_segments(control: Control, nbytes: int, method: Method) -> list[mmap.mmap]:
    """Return one zero-filled segment of ``nbytes`` per rank, by rank. Collective. The first cache line is reserved.

    Raises:
        MappingError: any rank could not create or map its segment (raised on every rank).
    """
    # A rank that cannot create its segment takes part in the exchange as well, and all ranks raise.
    own = _make(nbytes, method)
    try:
        offers, _ = control.exchange_object([own.path, nbytes, own.error])
        _raise_together("make", [str(offer[2]) for offer in offers])
        _check_sizes([offer[1] for offer in offers])
        maps, error = _open_all([str(offer[0]) for offer in offers], nbytes)
        errors, _ = control.exchange_object(error)
        _raise_together("map", [str(error) for error in errors])
    finally:
        # All ranks have mapped it or failed: the mappings keep the memory alive.
        own.close()
    return maps


def map_common_segment(control: Control, nbytes: int) -> tuple[mmap.mmap, mmap.mmap]:
    """Return one segment of ``nbytes`` that all ranks share, mapped twice: shared, and private. Collective.

    Writes through the private mapping are visible only to this process (copy on write); ``madvise(MADV_DONTNEED)``
    discards them, so that the shared contents are visible again. The first cache line is reserved.

    Raises:
        MappingError: rank 0 could not create the file, or a rank could not map it (raised on every rank).
    """
    own = _make(nbytes if control.rank == 0 else LINE_BYTES, "memfd")
    try:
        offers, _ = control.exchange_object([own.path, nbytes, own.error])
        _raise_together("make", [str(offer[2]) for offer in offers])
        _check_sizes([offer[1] for offer in offers])
        path = str(offers[0][0])
        maps, error = _open_all([path], nbytes)
        if maps:
            try:
                maps.append(_map_privately(path, nbytes))
            except (OSError, ValueError) as failure:
                error = f"{path} of rank 0, once more: {failure}"
        errors, _ = control.exchange_object(error)
        _raise_together("map", [str(error) for error in errors])
    finally:
        own.close()
    shared, private = maps
    return shared, private


def _check_sizes(sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise MappingError(f"ranks ask for different sizes: {sizes} bytes by rank; give the same specs everywhere")


def _map_privately(path: str, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(fd)


def _make(nbytes: int, method: Method) -> _Own:
    fd = -1
    path = ""
    try:
        if method == "memfd":
            fd = os.memfd_create("shardwise")
            path = f"/proc/{os.getpid()}/fd/{fd}"
            os.ftruncate(fd, nbytes)
        else:
            fd, path = tempfile.mkstemp(prefix="shardwise-", dir=SHM_FOLDER)
            # Reserve the space now, since with a full /dev/shm the first write would kill the process.
            os.posix_fallocate(fd, 0, nbytes)
        os.pwrite(fd, struct.pack("<q", MAGIC), 0)
    except (OSError, AttributeError) as error:
        return _Own(fd, path, f"{nbytes} bytes by {method}: {error}")
    return _Own(fd, path)


def _open_all(paths: list[str], nbytes: int) -> tuple[list[mmap.mmap], str]:
    maps: list[mmap.mmap] = []
    for rank, path in enumerate(paths):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                segment = mmap.mmap(fd, nbytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            return maps, f"{path} of rank {rank}: {error}"
        if struct.unpack_from("<q", segment)[0] != MAGIC:
            return maps, f"{path} of rank {rank} holds something else"
        if nbytes >= HUGE_PAGE_BYTES:
            # A hint only: fewer page faults if the kernel grants huge pages to shared memory.
            with contextlib.suppress(OSError, AttributeError):
                segment.madvise(mmap.MADV_HUGEPAGE)
        maps.append(segment)
    return maps, ""


def _raise_together(verb: str, errors: list[str]) -> None:
    failures = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if failures:
        raise MappingError(f"cannot {verb} shared memory ({'; '.join(failures)}); use shared_memory=False")
