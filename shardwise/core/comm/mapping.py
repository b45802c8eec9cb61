"""Memory of every rank of a group, mapped into every rank of it.

Each rank makes an anonymous file (memfd), whose pages live as long as somebody maps them: nothing is left behind, even
by SIGKILL. Peers open it through /proc/<pid>/fd. Where that is forbidden, a file in /dev/shm takes its place and is
unlinked as soon as all have opened it.
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

__all__ = [
    "LINE_BYTES",
    "LINE_WORDS",
    "MappingError",
    "Method",
    "host_facts",
    "is_running",
    "map_joint",
    "map_segments",
    "start_time",
]

Method = Literal["memfd", "file"]

LINE_BYTES = 64
LINE_WORDS = LINE_BYTES // 8
# Looked for in a peer's file once it is mapped: the path has led to the right one.
MAGIC = 0x53_68_61_72_64_77_69_73
HUGE_PAGE_BYTES = 2 * 1024 * 1024
SHM_FOLDER = "/dev/shm"
MAP_NORESERVE = 0x4000  # x86-64; what is private is dropped again soon


class MappingError(RuntimeError):
    """Memory could not be made or mapped. Raised by every rank of the group together."""


# [Note: Counters in shared memory]
# What ranks tell each other through shared memory are counters, each with one writer, in cache lines of their own.
# There are no locks: a rank writes its data and then its counter; who sees the counter sees the data. That is x86-64's
# order of stores, hence the check of the machine. A counter only grows, so a reader that looks late has missed nothing.
# * A reduction has three, of the last operation that this rank has published (its data may be read), reduced (its own
#   slice is summed) and consumed (it reads the peers' data no more). A buffer may be written again when all have
#   consumed.
# * A meeting has one, of arrivals, and two slots for what is told, in turn: who writes a slot again has seen all arrive
#   at the meeting in between, so nobody reads it then.
# * A rank that leaves or fails says so in a word of its own; one that is killed is found by its process. So a wait
#   ends, with a name. Who gives up a meeting says so in its slot, for those that come late; who has failed, and meets
#   all others again, takes that back.
# Whoever waits does its own part of older reductions meanwhile, or two ranks could wait for each other's.
def host_facts() -> dict[str, str]:
    """What must be equal for ranks to share memory with plain loads and stores; empty where that is not possible.

    The counters rely on x86-64's store order: a rank that sees a counter also sees the data written before it.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return {}
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return {"boot": boot, "host": socket.gethostname(), "processes": os.readlink("/proc/self/ns/pid")}


def start_time(pid: int) -> int:
    """Clock tick at which process ``pid`` started, or -1 where it is gone or dead but not yet collected."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    # A process number may be used again; with its start time it is one process's.
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def is_running(pid: int, started: int) -> bool:
    """Whether the process that had this pid and start time still runs."""
    return start_time(pid) == started


@dataclass
class _Own:
    """This rank's file while the others open it."""

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
    """One zero-filled segment of ``nbytes`` per rank, by rank. Collective. The first cache line of each is taken.

    Raises:
        MappingError: on every rank, when any rank could not make or map its part.
    """
    # A rank that cannot make its part comes to the exchange all the same, and all of them raise.
    own = _make(nbytes, method)
    try:
        offers, _ = control.exchange_object([own.path, nbytes, own.error])
        _raise_together("make", [str(offer[2]) for offer in offers])
        _check_sizes([offer[1] for offer in offers])
        maps, error = _open_all([str(offer[0]) for offer in offers], nbytes)
        errors, _ = control.exchange_object(error)
        _raise_together("map", [str(error) for error in errors])
    finally:
        # All have mapped it, or given up: the mappings keep the memory.
        own.close()
    return maps


def map_joint(control: Control, nbytes: int) -> tuple[mmap.mmap, mmap.mmap]:
    """One segment of ``nbytes`` that all ranks share, mapped twice: shared, and privately. Collective.

    What is written through the private mapping is this process's alone (copy on write); ``madvise(MADV_DONTNEED)``
    drops it, and shows what is shared again. The first cache line is taken.

    Raises:
        MappingError: on every rank, when rank 0 could not make it or any rank not map it.
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
            # Reserved now, since a full /dev/shm would otherwise kill the process at the first write.
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
            # Advice only: fewer page faults where the kernel grants huge pages to shared memory.
            with contextlib.suppress(OSError, AttributeError):
                segment.madvise(mmap.MADV_HUGEPAGE)
        maps.append(segment)
    return maps, ""


def _raise_together(verb: str, errors: list[str]) -> None:
    told = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if told:
        raise MappingError(f"cannot {verb} shared memory ({'; '.join(told)}); use shared_memory=False")
