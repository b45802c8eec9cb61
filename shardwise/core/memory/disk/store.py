"""Records on disk that survive a failed step: asynchronous, with checksums, in two versions each.

A record is an array of bytes of fixed size with room for two versions: the committed one, which reads return, and
another one, which writes go to. :meth:`DiskStore.commit` makes written data current, and :meth:`DiskStore.rollback`
drops it. After any failure between two commits (no space, a broken device, an exception elsewhere), the state of the
last commit is intact. The store is memory, not a checkpoint: it ends with its process.

Source: the optimizer and parameter swapping of ZeRO-Infinity (arXiv 2104.07857, sections 5 and 6).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.core.base.interrupts import deferred_interrupts
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.io_threads import (
    ALIGNMENT_BYTES,
    DiskIO,
    DiskThread,
    MakeQueue,
    Operation,
    ThreadQueue,
    Transfer,
    round_up,
)
from shardwise.core.memory.disk.medium import FILE, MediumFile, open_medium
from shardwise.core.memory.disk.rank_file import DiskFile, RunDirectory

if TYPE_CHECKING:
    from shardwise.plan import DiskPlan

Allocate = Callable[[int], Tensor]


class BufferPool:
    """Aligned buffers, whose number and sizes :meth:`reserve` sets. For one thread at a time.

    ``allocate(nbytes)`` returns a one-dimensional uint8 CPU tensor of that many bytes (pinned memory, for example);
    ``None``: anonymous pages of this process.

    Attributes:
        reserved_bytes: total size of all buffers.
    """

    def __init__(self, allocate: Allocate | None = None) -> None:
        self._allocate = allocate or _pages
        self._buffers: list[tuple[int, Tensor]] = []
        """All buffers with their addresses, smallest first."""
        self._in_use: set[int] = set()  # addresses
        self.reserved_bytes = 0

    def reserve(self, count: int, nbytes: int) -> None:
        """Add ``count`` buffers of ``nbytes``, rounded up to 4096 and touched, so that no transfer hits a fresh page.

        Raises:
            ValueError: a negative number.
        """
        if count < 0 or nbytes < 0:
            raise ValueError(f"reserve(count={count}, nbytes={nbytes}): give numbers >= 0")
        size = max(round_up(nbytes), ALIGNMENT_BYTES)
        more = []
        for _ in range(count):
            memory = self._allocate(size + ALIGNMENT_BYTES)
            if memory.dtype is not torch.uint8 or memory.device.type != "cpu" or memory.numel() < size:
                raise ValueError(f"allocate gave {memory.dtype} on {memory.device}: give uint8 on the CPU")
            skip = -memory.data_ptr() % ALIGNMENT_BYTES
            buffer = memory[skip : skip + size].zero_()
            more.append((buffer.data_ptr(), buffer))
        self._buffers = sorted([*self._buffers, *more], key=lambda each: each[1].numel())
        self.reserved_bytes += size * count

    def take(self, nbytes: int) -> Tensor:
        """Return the smallest free buffer for ``nbytes``: 1-D uint8, ``nbytes`` rounded up to 4096.

        Raises:
            RuntimeError: no such buffer is free.
        """
        size = max(round_up(nbytes), ALIGNMENT_BYTES)
        for address, buffer in self._buffers:
            if address not in self._in_use and buffer.numel() >= size:
                self._in_use.add(address)
                return buffer[:size]
        free = [buffer.numel() for address, buffer in self._buffers if address not in self._in_use]
        sizes = [buffer.numel() for address, buffer in self._buffers if address in self._in_use]
        raise RuntimeError(
            f"no free buffer of {size} bytes; free sizes: {free}, taken: {sizes}; "
            "give() one back first, or reserve() more"
        )

    def idle(self, nbytes: int) -> int:
        """Return how many free buffers can hold ``nbytes``."""
        return sum(buffer.numel() >= round_up(nbytes) for at, buffer in self._buffers if at not in self._in_use)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer of :meth:`take`, or a view with the same start.

        Raises:
            ValueError: the buffer is not in use, or not from this pool.
        """
        if buffer.data_ptr() not in self._in_use:
            raise ValueError(
                f"a buffer at address {buffer.data_ptr():#x} is not in use; give back what buffer() returned, once"
            )
        self._in_use.remove(buffer.data_ptr())

    def close(self) -> None:
        """Drop all buffers. A buffer that is still referenced elsewhere stays valid."""
        self._buffers, self._in_use, self.reserved_bytes = [], set(), 0


def _pages(nbytes: int) -> Tensor:
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages for the kernel to pin per request
    return torch.frombuffer(memory, dtype=torch.uint8)


# [Note: Two versions of a record]
# Each record has two places of equal size in the file. One holds the committed version, which reads return; writes go
# to the other. Only commit() swaps them, and only if every write was waited for and none failed. The last commit is
# therefore intact after any failure (no space, a device, the program). An update on a disk consists of these steps:
# write everything, agree with the peers that no rank failed, and commit or roll back, which is free. The cost is twice
# the space; nothing is written twice.
# * ``newest`` reads data that was written and not committed: a tile that is visited again, a chunk that is changed in
#   parts.
# * Commits are made per owner, which is an optimizer: writes of another one ahead of its step are not committed yet.
# * Checksums belong to a version and are in memory: a read compares the data from the disk with the data that was
# written.
@dataclass(eq=False)
class _Version:
    offset: int
    sums: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Record:
    """A named array of ``nbytes`` bytes on disk, which is committed and rolled back with its ``owner``."""

    name: str
    nbytes: int
    owner: int
    _versions: tuple[_Version, _Version]
    _committed: int | None = None
    _written: Operation | None = None

    @property
    def padded_bytes(self) -> int:
        """The bytes of one transfer: ``nbytes`` rounded up to 4096."""
        return round_up(self.nbytes)

    def _target(self) -> int:
        return 0 if self._committed is None else 1 - self._committed


class DiskStore:
    """The records of one rank, in a separate file under ``plan.directory``, for the lifetime of the process.

    Another medium may keep them elsewhere; see :class:`~shardwise.core.memory.disk.medium.Medium`. Several threads may
    use the store, each with its own records and buffers. Transfers run in threads of the store.

    Args:
        plan: the directory, and the settings of transfers.
        rank: this rank, for the name of the file.
        allocate: makes host memory for :meth:`reserve` (``nbytes`` -> uint8 tensor); ``None``: ordinary pages.
        queues: makes the queue of one thread; ``None``: :class:`ThreadQueue`.

    Attributes:
        path: the file, or the medium's name and directory, for messages. A file's name is removed right after opening,
            if the file system supports it.
        direct: whether transfers bypass the page cache.
        removed: run directories of dead processes that were removed at the start.

    Warns:
        UserWarning: once, where direct I/O is refused.

    Raises:
        DiskError: the directory cannot be made or written, the medium cannot be opened, or the system refuses threads.
        ValueError: no medium of that name is registered.
        TypeError: the registered function does not return a medium.
    """

    def __init__(
        self,
        plan: DiskPlan,
        rank: int = 0,
        *,
        allocate: Allocate | None = None,
        queues: MakeQueue | None = None,
    ) -> None:
        self._file, directory = _open(plan, rank)
        try:
            self._io = _threads(plan, self._file, queues or ThreadQueue)
        except BaseException:
            _close(self._file, directory)
            raise
        self.path, self.direct = self._file.path, self._file.direct
        self.removed = directory.removed if directory is not None else []
        self._lock = threading.RLock()
        self._buffers = BufferPool(allocate)
        self._records: dict[str, Record] = {}
        self._pending: dict[Record, Operation] = {}
        self._counted = {False: 0, True: 0}
        """Bytes read and (True) written before the last :meth:`reset_counters`."""
        self._running: list[tuple[_Version, Operation]] = []
        """Operations that may still run, and the versions that they read or write; see :meth:`_unfinished`."""
        # Also runs when the interpreter exits; the threads are daemons, so that they still work then.
        self._finalizer = weakref.finalize(self, _release, self._io, self._file, directory)

    def create(self, name: str, nbytes: int, owner: int = -1) -> Record:
        """Create a record, and reserve space for both of its versions.

        Args:
            name: a unique name, for messages.
            nbytes: size of the record.
            owner: see :meth:`commit`.

        Raises:
            ValueError: the name is taken, or ``nbytes`` is negative.
            DiskError: there is not enough space (the message has the needed and the free space), or the store is
                closed.
        """
        with self._lock:
            self._require_open()
            if name in self._records:
                size = self._records[name].nbytes
                raise ValueError(f"there is a record {name!r} of {size} bytes already: names are unique")
            if nbytes < 0:
                raise ValueError(f"nbytes={nbytes} for record {name!r}: give a size >= 0")
            size = round_up(nbytes)
            offset = self._file.reserve(2 * size, f"two versions of record {name!r} ({nbytes} bytes)")
            record = Record(name, nbytes, owner, (_Version(offset), _Version(offset + size)))
            self._records[name] = record
            return record

    def reserve(self, count: int, nbytes: int) -> None:
        """Add ``count`` buffers of at least ``nbytes`` to the pool of :meth:`buffer`.

        Raises:
            ValueError: a negative number.
        """
        with self._lock:
            self._buffers.reserve(count, nbytes)

    def buffer(self, nbytes: int) -> Tensor:
        """Return a free buffer: 1-D uint8, ``nbytes`` rounded up to 4096, at a multiple of 4096.

        Raises:
            RuntimeError: all that are large enough are in use.
        """
        with self._lock:
            return self._buffers.take(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer of :meth:`buffer` (or a view with the same start), once no transfer uses it.

        Raises:
            ValueError: the buffer is not in use.
        """
        # After an error, a transfer may still be running; it must not overwrite the next user's data.
        self._end_transfers(buffer)
        with self._lock:
            self._buffers.give(buffer)

    def _end_transfers(self, buffer: Tensor) -> None:
        with self._lock:
            using = [one for _, one in self._unfinished() if one.memory.ctypes.data == buffer.data_ptr()]
        for operation in using:
            with contextlib.suppress(DiskError):
                self._io.handle(operation).wait()

    def idle_buffers(self, nbytes: int) -> int:
        """Return how many calls of :meth:`buffer` for ``nbytes`` would succeed now."""
        with self._lock:
            return self._buffers.idle(nbytes)

    @property
    def buffer_bytes(self) -> int:
        """Memory of all buffers."""
        return self._buffers.reserved_bytes

    def read(self, record: Record, buffer: Tensor, *, newest: bool = False, urgent: bool = False) -> Transfer:
        """Start to read the committed version (with ``newest`` an uncommitted one, if there is) into ``buffer``.

        ``urgent`` transfers go before others that have not begun.

        After ``wait()`` the first ``record.nbytes`` bytes of ``buffer`` are the record's; what follows, up to
        ``record.padded_bytes``, is undefined.

        Raises:
            ValueError: ``buffer`` does not fit (see :meth:`write`).
            DiskError: there is no such version.
        """
        with self._lock:
            written = record._written if newest else None
            if written is not None and (not written.waited or written.error is not None):
                raise DiskError(
                    f"the newest version of {self._what(record)} is not complete: wait() for its write first, "
                    "and write again or rollback() where that failed"
                )
            index = record._committed if written is None else record._target()
            if index is None:
                state = "was written but not committed" if record._written is not None else "was never written"
                raise DiskError(f"{self._what(record)} {state}: write(), wait() and commit() come before read()")
            version = record._versions[index]
            operation = self._operation(record, version, buffer, version.sums, urgent=urgent)
            self._start(version, operation)
            return self._io.handle(operation)

    def write(self, record: Record, buffer: Tensor) -> Transfer:
        """Start to write the first ``record.nbytes`` bytes of ``buffer``; the committed version stays as it is.

        ``buffer`` is a contiguous CPU tensor of any dtype whose address is a multiple of 4096 and that has at least
        ``record.padded_bytes`` bytes; all of these are transferred. It must not change before ``wait()`` returns.

        Raises:
            ValueError: ``buffer`` does not fit.
            RuntimeError: a transfer that uses the place of the new version still runs.
        """
        with self._lock:
            version = record._versions[record._target()]
            if names := ", ".join(operation.name for used, operation in self._unfinished() if used is version):
                raise RuntimeError(f"cannot write {self._what(record)} while {names} runs: wait() for it first")
            sums = [0] * self._io.segments(record.padded_bytes)
            operation = self._operation(record, version, buffer, sums, writing=True)
            with deferred_interrupts("a disk transfer"):  # otherwise a wait for it would never end
                # Noted before it begins: a version that is being written must not be taken for an untouched one.
                self._pending[record] = record._written = operation
                version.sums = sums
                self._start(version, operation)
            return self._io.handle(operation)

    def commit(self, owner: int | None = None) -> None:
        """Commit every version that was written since the last commit, all or none.

        Args:
            owner: the owner of the records. ``None`` stands for all owners.

        Raises:
            DiskError: a write was not waited for, or failed. Nothing changes; write that record again, or rollback.
        """
        with self._lock:
            pending = self._pending_of(owner)
            for operation in pending.values():
                if not operation.waited or operation.error is not None:
                    reason = f"failed ({operation.error})" if operation.error else "was not waited for"
                    raise DiskError(
                        f"cannot commit: {operation.name} {reason}; wait() for it, write it again, or rollback()"
                    )
            for record in pending:
                record._committed = record._target()
                record._written = None
                del self._pending[record]

    def rollback(self, owner: int | None = None) -> None:
        """Drop what was written since the last commit, after waiting for writes that still run.

        Args:
            owner: the owner of the records. ``None`` stands for all owners.
        """
        with self._lock:
            for record, operation in self._pending_of(owner).items():
                with contextlib.suppress(DiskError):
                    self._io.handle(operation).wait()
                record._written = None
                del self._pending[record]

    def _pending_of(self, owner: int | None) -> dict[Record, Operation]:
        return {r: operation for r, operation in self._pending.items() if owner is None or r.owner == owner}

    @property
    def bytes_read(self) -> int:
        """Bytes transferred from disk since the start or :meth:`reset_counters`, with the padding to 4096."""
        return self._io.moved(writing=False) - self._counted[False]

    @property
    def bytes_written(self) -> int:
        """Bytes transferred to disk since the start or :meth:`reset_counters`, with the padding to 4096."""
        return self._io.moved(writing=True) - self._counted[True]

    def reset_counters(self) -> None:
        """Reset the counters."""
        self._counted = {writing: self._io.moved(writing) for writing in (False, True)}

    @property
    def reserved_bytes(self) -> int:
        """Space that the records hold on the device."""
        return self._file.nbytes

    def close(self) -> None:
        """Wait for running transfers, then remove the file and its directory. Idempotent."""
        self._finalizer()
        self._buffers.close()
        self._pending.clear()
        self._running.clear()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _what(self, record: Record) -> str:
        return f"record {record.name!r} in {self.path}"

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise DiskError(f"the store in {self.path} is closed: make a new one")

    def _unfinished(self) -> list[tuple[_Version, Operation]]:
        """Return running operations, and drop finished ones, so that reads of unchanged records do not pile up."""
        self._running = [each for each in self._running if not each[1].over.is_set()]
        return self._running

    def _start(self, version: _Version, operation: Operation) -> None:
        with deferred_interrupts("a disk transfer"):
            self._unfinished().append((version, operation))
            self._io.start(operation)

    def _operation(
        self,
        record: Record,
        version: _Version,
        buffer: Tensor,
        sums: list[int],
        *,
        writing: bool = False,
        urgent: bool = False,
    ) -> Operation:
        self._require_open()
        if self._records.get(record.name) is not record:
            raise ValueError(f"record {record.name!r} belongs to another store, not to the one in {self.path}")
        return Operation(
            what=self._what(record),
            writing=writing,
            urgent=urgent,
            offset=version.offset,
            nbytes=record.nbytes,
            memory=_bytes_of(buffer, record),
            sums=sums,
        )


def _bytes_of(buffer: Tensor, record: Record) -> npt.NDArray[np.uint8]:
    size = record.padded_bytes
    if buffer.device.type != "cpu" or not buffer.is_contiguous() or buffer.nbytes < size:
        raise ValueError(
            f"a {tuple(buffer.shape)} {buffer.dtype} tensor on {buffer.device} ({buffer.nbytes} bytes, contiguous: "
            f"{buffer.is_contiguous()}) for record {record.name!r}: give a contiguous CPU tensor of {size} bytes"
        )
    if buffer.data_ptr() % ALIGNMENT_BYTES:
        raise ValueError(
            f"a buffer at address {buffer.data_ptr():#x} for record {record.name!r}: give one from buffer(), "
            f"whose address is a multiple of {ALIGNMENT_BYTES}"
        )
    memory: npt.NDArray[np.uint8] = buffer.detach().view(-1).view(torch.uint8).numpy()[:size]
    return memory


def _open(plan: DiskPlan, rank: int) -> tuple[DiskFile | MediumFile, RunDirectory | None]:
    """Open the file or medium, and the directory of the file."""
    if plan.medium != FILE:
        return open_medium(plan, rank), None
    directory = RunDirectory(plan.directory)
    try:
        return DiskFile(os.path.join(directory.path, f"rank{rank}.data")), directory
    except BaseException:
        directory.close()
        raise


def _threads(plan: DiskPlan, file: DiskFile | MediumFile, make: MakeQueue) -> DiskIO:
    try:
        with contextlib.ExitStack() as undo:
            queues = []
            for _ in range(plan.threads):
                queues.append(make(plan.queue_depth, file.transfer))
                undo.callback(queues[-1].close)
            io = DiskIO(queues, plan)
            undo.pop_all()
            return io
    except RuntimeError as error:
        raise DiskError(
            f"cannot start {plan.threads} threads, and one more for each, to transfer to {file.path}: {error}; give "
            "fewer (threads=1), or allow this user more (ulimit -u)"
        ) from error


def _release(io: DiskIO, file: DiskFile | MediumFile, directory: RunDirectory | None) -> None:
    if isinstance(threading.current_thread(), DiskThread):  # see [Note: Threads of a store]
        threading.Thread(target=_release, args=(io, file, directory), name="shardwise-disk-end").start()
        return
    io.close()
    _close(file, directory)


def _close(file: DiskFile | MediumFile, directory: RunDirectory | None) -> None:
    try:
        file.close()
    finally:
        if directory is not None:
            directory.close()
