"""Where a chunk's shard is at home, and how it gets from there into a gathered array."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise.core.base.device import SideCopy, behind_current, sent_ahead
from shardwise.core.comm import DONE, Buffer, Group, Handle
from shardwise.core.memory.disk.store import DiskError, DiskStore, Record
from shardwise.core.memory.tier import Tier

__all__ = ["DiskSource", "MemorySource", "ReadAhead", "SecondaryShards", "SecondarySource", "ShardSource"]


class ShardSource(Protocol):
    """The home of one shard."""

    tier: Tier
    peers_take_part: bool
    """A gather needs every rank, even where the group's own gathers do not."""

    @property
    def exchange(self) -> Buffer:
        """The memory that peers read, long-lived."""

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        """The shard in memory inside the block; with ``write`` changes to it are kept."""

    @contextmanager
    def renewing(self) -> Iterator[torch.Tensor]:
        """Memory for a new shard, all of which is written inside the block; :meth:`forget` once it is current."""

    def brought(self, shard: torch.Tensor) -> torch.Tensor:
        """What a gather brings of ``shard``; see :meth:`Group.brought`."""

    def prepare(self) -> None:
        """A gather comes soon: start what can be done without the peers."""

    def forget(self) -> None:
        """Whatever :meth:`prepare` started is out of date."""

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        """Every rank's shard in rank order into ``out`` (1-D, on the device)."""

    def joined(self, group: Group) -> torch.Tensor | None:
        """The same without a copy, where the group can."""


class MemorySource:
    """In the device's or the host's memory.

    Args:
        exchange: the memory.
        tier: whose it is.
        uploads: the stream for copies from the host to a GPU, so that those that are made ahead run beside compute.
        over: the group that gathers it, of the same ranks as the one that is given; ``None``: that one.
    """

    peers_take_part = False

    def __init__(
        self, exchange: Buffer, tier: Tier, uploads: torch.cuda.Stream | None = None, over: Group | None = None
    ) -> None:
        self._exchange, self.tier, self._uploads, self._over = exchange, tier, uploads, over

    @property
    def exchange(self) -> Buffer:
        return self._exchange

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        yield self._exchange.local

    @contextmanager
    def renewing(self) -> Iterator[torch.Tensor]:
        yield self._exchange.local

    def brought(self, shard: torch.Tensor) -> torch.Tensor:
        return shard if self._over is None else self._over.brought(shard)

    def prepare(self) -> None:
        """Nothing to do."""

    def forget(self) -> None:
        """Nothing to do."""

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        # [Note: Which stream a gather runs on]
        # From the device's own memory: the group's. From the host's to a GPU: an upload stream, behind what the compute
        # stream was given, which may have used the memory before. With several ranks the collective begins while that
        # stream is the current one, so it waits for the upload, and the compute stream for neither until the handle is
        # waited for. Uploads read shards that the CPU writes at the next update: Values.before_update has the host wait
        # for the device first.
        local, group = self._exchange.local, self._over or group
        if local.device == out.device:
            return group.all_gather(out, self._exchange)
        if group.size == 1 and self._uploads is not None:
            return SideCopy(local, out, self._uploads)
        if self._uploads is None:
            staged = self._staged(local.to(out.device))
            return _Keeping(group.all_gather(out, staged), staged)
        # Behind whoever used the memory of both before: what a gather leaves is free when the computation has waited.
        with behind_current(out.device, self._uploads):  # the gather waits for the upload, the computation for neither
            staged = self._staged(sent_ahead(local, out.device))
            return _Keeping(group.all_gather(out, staged), staged)

    def _staged(self, shard: torch.Tensor) -> Buffer:
        staged = Buffer(shard)
        staged.bounds = self._exchange.bounds
        return staged

    def joined(self, group: Group) -> torch.Tensor | None:
        return (self._over or group).joined(self._exchange)


class _Keeping:
    """A handle that keeps what its operation reads alive."""

    def __init__(self, handle: Handle, kept: object) -> None:
        self._handle, self._kept = handle, kept

    def finished(self) -> bool:
        return self._handle.finished()

    def wait(self) -> None:
        self._handle.wait()
        self._kept = None


# [Note: Buffers of shards on a disk]
# All shards that are at home on one disk share a fixed number of equal buffers. Each user has its own share of them, so
# that none waits for another: ``renewals`` are the update thread's, which writes new shards while the caller gathers.
# Of the rest two are never read ahead into: one is for the gather in use, one for a change. Buffers are equal because a
# small shard that took the only large one would leave a large shard without. With one rank a gather holds its buffer
# until the array is filled, oldest first (``gathers``). With several the gather is over when it returns: each rank
# copies its shard into exchange memory that all chunks share, and that may be written again behind the fence at its
# end.
@dataclass
class ReadAhead:
    """What the shards on one disk share: buffers of one size, and how many of them hold what is needed later.

    Attributes:
        buffer_bytes: what is asked for, whatever a shard needs itself, so that a small one takes no large one's.
        buffers: how many there are for gathers, reads ahead and changes, at least 1.
        renewals: how many there are beside them for :meth:`DiskSource.renewing`, which another thread may call then.
        count: how many have been read ahead.
        gathers: of a single rank, under way, oldest first.
    """

    buffer_bytes: int
    buffers: int
    renewals: int = 0
    count: int = 0
    gathers: deque[_FromDisk] = field(default_factory=deque)


class DiskSource:
    """On a disk; one of the store's buffers holds it while it is gathered or changed.

    Gathers give the committed version, so a new one may be written beside them.

    Args:
        store: the rank's store, with buffers of at least the shard's size.
        record: the shard's place in it.
        numel: elements of the shard.
        dtype: of the shard.
        staging: exchange memory of at least ``numel`` elements, shared by all such chunks; ``None`` on one rank.
        ahead: what all such chunks share.
        over: as of a :class:`MemorySource`.
    """

    tier = Tier.DISK

    def __init__(
        self,
        store: DiskStore,
        record: Record,
        numel: int,
        dtype: torch.dtype,
        staging: Buffer | None,
        ahead: ReadAhead,
        over: Group | None = None,
    ) -> None:
        self.store, self.record, self._shared, self._over = store, record, ahead, over
        self._numel, self._dtype, self._staging = numel, dtype, staging
        self._nbytes = numel * dtype.itemsize
        self._ahead: tuple[torch.Tensor, Handle] | None = None
        self._written = False
        self.peers_take_part = staging is not None

    @property
    def exchange(self) -> Buffer:
        raise RuntimeError(f"a shard at home on the {self.tier.value} has no memory of its own; report this")

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[: self._nbytes].view(self._dtype)

    def _read(self, newest: bool = False) -> tuple[torch.Tensor, Handle]:
        started, self._ahead = self._ahead, None
        if started is not None:
            self._shared.count -= 1
            return started
        buffer = self._buffer()
        if not self._written:  # first values are about to be put in
            buffer.zero_()
            return buffer, DONE
        try:
            return buffer, self.store.read(self.record, buffer, newest=newest, urgent=True)  # compute waits for it
        except BaseException:
            self.store.give(buffer)
            raise

    def _buffer(self) -> torch.Tensor:
        """A free buffer; gathers of other chunks that hold the last ones are finished."""
        gathers = self._shared.gathers
        while gathers and (gathers[0].filled or len(gathers) + self._shared.count >= self._shared.buffers):
            gathers[0].fill()
            gathers.popleft()
        return self.store.buffer(self._shared.buffer_bytes)

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        # A shard that was read ahead is taken here, so nothing out of date remains after a write.
        buffer, reading = self._read(newest=True)
        try:
            reading.wait()
            yield self._view(buffer)
            if write:
                self.store.write(self.record, buffer).wait()
                self._written = True
        finally:
            self.store.give(buffer)

    @contextmanager
    def renewing(self) -> Iterator[torch.Tensor]:
        buffer = self.store.buffer(self._shared.buffer_bytes) if self._shared.renewals else self._buffer()
        try:
            buffer.zero_()  # what no parameter has of it
            yield self._view(buffer)
            self.store.write(self.record, buffer).wait()
            self._written = True
        finally:
            self.store.give(buffer)

    def brought(self, shard: torch.Tensor) -> torch.Tensor:
        return shard if self._over is None else self._over.brought(shard)

    def prepare(self) -> None:
        if self._ahead is None and self._written and self._shared.count < self._shared.buffers - 2:
            self._ahead = self._read()
            self._shared.count += 1

    def forget(self) -> None:
        if self._ahead is not None:
            buffer, _ = self._read()
            self.store.give(buffer)

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        buffer, reading = self._read()
        if self._staging is None:
            self._shared.gathers.append(_FromDisk(self.store, buffer, reading, self._view(buffer), out))
            return self._shared.gathers[-1]
        failure: DiskError | None = None
        try:
            reading.wait()
            self._staging.wait_writable()
            self._staging.resize(self._numel)
            self._staging.local.copy_(self._view(buffer))
        except DiskError as error:
            failure = error
        finally:
            self.store.give(buffer)
        # A rank that cannot read tells the others, which would wait for it; and all shards are in place after this.
        if not group.summarize([float(failure is None)], "whether a shard could be read from the disk").least[0]:
            posts = group.exchange([float(failure is None)], "which ranks could not read a shard from the disk")
            if failure is not None:
                raise failure
            ranks = [rank for rank, post in enumerate(posts) if not post[0]]
            raise DiskError(f"{self.record.name}: ranks {ranks} of {group.name} could not read it; see their messages")
        (self._over or group).all_gather(out, self._staging).wait()
        # The next chunk's shard goes into the same memory.
        group.fence()
        return DONE

    def joined(self, group: Group) -> torch.Tensor | None:
        return None


class _FromDisk:
    """A read that ends in the gathered array of a single rank."""

    def __init__(
        self, store: DiskStore, buffer: torch.Tensor, reading: Handle, shard: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._store, self._buffer, self._reading = store, buffer, reading
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = (out, shard)
        self._failure: DiskError | None = None

    @property
    def filled(self) -> bool:
        return self._copy is None

    def finished(self) -> bool:
        return self.filled or self._reading.finished()

    def fill(self) -> None:
        """Finish and give the buffer back; a failure is kept for :meth:`wait`."""
        if self._copy is not None:
            out, shard = self._copy
            try:
                self._reading.wait()
                out.copy_(shard)
            except DiskError as error:
                self._failure = error
            self._end()

    def _end(self) -> None:
        if self._copy is not None:
            self._copy = None
            self._store.give(self._buffer)

    def wait(self) -> None:
        self.fill()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


# [Note: Secondary shards]
# Where a plan has ``secondary=k``, each ``k`` neighbours of a shard group keep a copy of the parameters together, in
# the dtype of the shards and in their tier. The first gather of a chunk after an update is made by the whole
# group. As soon as it has arrived, and before any parameter shows it (a module may write to what it is given), each
# rank copies its k-th part. From then on gathers of the chunk are made by the k ranks alone, in forward and backward
# passes and in those that make no graph, until shards are written (forget). The values are equal, so is all that comes
# of them.
# * Who has what is a matter of which gathers have begun, not of which have arrived: all ranks of the shard group take
#   part in all gathers, in one order (peers_take_part), so they have begun the same ones. After a pass that failed, and
#   where ranks agree on gathers and find that it differs (SecondaryShards), all of them forget everything, and gather
#   as a whole group again.
# * A gather of secondary shards first waits for the one that brings this rank's. Where memory is mapped nobody sees
#   that the peers have theirs: then all k meet before they read. They read at once, and what is read is written again
#   after a later round at the earliest, to which every rank comes when it has read.
# * What travels in 8 bits is rounded already when it arrives (see [Note: Rounded parameters]). A k-th of a chunk is
#   whole shards, so it travels in 8 bits among the k ranks too, in the blocks that were rounded together.
class SecondarySource:
    """In memory, with a secondary shard beside it; see [Note: Secondary shards].

    Args:
        own: the home of this rank's shard.
        kept: the home of its secondary shard, ``numel / k`` elements of a chunk.
        among: the ``k`` ranks that have the others of the copy.
    """

    peers_take_part = True

    def __init__(self, own: MemorySource, kept: MemorySource, among: Group) -> None:
        self._own, self.kept, self._among = own, kept, among
        self.tier = own.tier
        self.begun = False
        """Whether a gather has begun that brings what is kept, or has brought it."""
        self._arriving: _Arriving | None = None

    @property
    def exchange(self) -> Buffer:
        return self._own.exchange

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        with self._own.opened(write) as shard:
            yield shard

    @contextmanager
    def renewing(self) -> Iterator[torch.Tensor]:
        with self._own.renewing() as shard:
            yield shard

    def brought(self, shard: torch.Tensor) -> torch.Tensor:
        return self._own.brought(shard)

    def prepare(self) -> None:
        """Nothing to do."""

    def forget(self) -> None:
        """The shards have other values: the next gather is made by the whole group."""
        self.begun, self._arriving = False, None

    def gather(self, group: Group, out: torch.Tensor) -> Handle:
        if not self.begun:
            self._arriving = arriving = _Arriving(self, self._own.gather(group, out), out)
            self.begun = True
            return arriving
        if self._arriving is not None:
            self._arriving.wait()
        if self._among.one_sided_gather:
            self._among.fence()
        return self.kept.gather(self._among, out)

    def keep(self, arriving: _Arriving, full: torch.Tensor) -> None:
        """``full`` has arrived; this rank's part of it is kept, unless the shards have changed since it began."""
        if self._arriving is arriving:
            self.kept.exchange.local.copy_(self._among.slice_of(full, self._among.rank))
            self._arriving = None

    def joined(self, group: Group) -> torch.Tensor | None:
        return None


class _Arriving:
    """A gather by the whole group, of which this rank keeps its part."""

    def __init__(self, source: SecondarySource, handle: Handle, full: torch.Tensor) -> None:
        self._source, self._handle = source, handle
        self._full: torch.Tensor | None = full

    def finished(self) -> bool:
        return self._full is None or self._handle.finished()

    def wait(self) -> None:
        if self._full is None:
            return
        try:
            self._handle.wait()
        except Exception:  # after an interrupt it is waited for again
            self._full = None
            self._source.forget()
            raise
        self._source.keep(self, self._full)
        self._full = None  # its owner may have another use for it


class SecondaryShards:
    """Which of a model's chunks have secondary shards now; the others, and resident ones, do not count."""

    def __init__(self, sources: Sequence[ShardSource]) -> None:
        self._sources = [source for source in sources if isinstance(source, SecondarySource)]

    def digest(self) -> float:
        """A number that tells apart which those are; 0 where no chunk ever has one."""
        return float(zlib.crc32(bytes(source.begun for source in self._sources)))

    def forget(self) -> None:
        """Of all of them; see :meth:`SecondarySource.forget`."""
        for source in self._sources:
            source.forget()
