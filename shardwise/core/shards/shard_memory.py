"""The home of a chunk's shard (device, host or disk memory), and how a gather reads it from there.

:class:`SecondarySource` adds a second, larger shard (hpZ), so that gathers after the first one stay within few ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shardwise.core.base.device import SideCopy, behind_current, sent_ahead
from shardwise.core.comm import DONE, Buffer, Group, Handle
from shardwise.core.memory.disk.errors import DiskError
from shardwise.core.memory.disk.store import DiskStore, Record
from shardwise.core.memory.tier import Tier


class Arrival(Protocol):
    """A gather that has begun, or begins when it is waited for."""

    def wait(self) -> None:
        """As :meth:`Handle.wait`."""


class ShardSource(ABC):
    """The home of one shard.

    Args:
        tier: the tier of the memory.
        exchange: the memory that peers read, long-lived; ``None`` on a disk.
        over: the group that gathers the shard, of the same ranks as the group given to a call; ``None``: that group.
    """

    peers_take_part = False
    """Whether a gather needs every rank, even if the group's own gathers do not."""

    def __init__(self, tier: Tier, exchange: Buffer | None, over: Group | None) -> None:
        self.tier, self._exchange, self._over = tier, exchange, over

    @property
    def exchange(self) -> Buffer:
        """The memory that peers read, long-lived."""
        assert self._exchange is not None
        return self._exchange

    @abstractmethod
    def opened(self, write: bool) -> AbstractContextManager[torch.Tensor]:
        """Return a context with the shard in memory. With ``write``, changes are kept."""

    @abstractmethod
    def renewing(self) -> AbstractContextManager[torch.Tensor]:
        """Return a context with memory for a new shard, all of which is written inside.

        Call :meth:`forget` once the new shard is current.
        """

    @abstractmethod
    def gather(self, group: Group, out: torch.Tensor) -> Arrival:
        """Begin to gather every rank's shard in rank order into ``out`` (1-D, on the device)."""

    def joined(self, group: Group) -> torch.Tensor | None:
        """Return a zero-copy view of all shards, where the group can map them."""
        return None

    def dequantized(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the values of ``shard`` that a gather returns. See :meth:`Group.dequantized`."""
        return shard if self._over is None else self._over.dequantized(shard)

    def prepare(self) -> None:  # noqa: B027
        """Begin the part of the next gather that does not need the peers."""

    def forget(self) -> None:  # noqa: B027
        """Drop what :meth:`prepare` began, since the shard has other values."""


class MemorySource(ShardSource):
    """A shard in device or host memory.

    Args:
        exchange: the memory.
        tier: the tier of the memory.
        uploads: the stream for copies from the host to a GPU, so that prefetches overlap with compute.
        over: see :class:`ShardSource`.
    """

    def __init__(
        self, exchange: Buffer, tier: Tier, uploads: torch.cuda.Stream | None = None, over: Group | None = None
    ) -> None:
        super().__init__(tier, exchange, over)
        self._uploads = uploads

    def opened(self, write: bool) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(self.exchange.local)

    def renewing(self) -> AbstractContextManager[torch.Tensor]:
        return nullcontext(self.exchange.local)

    def gather(self, group: Group, out: torch.Tensor) -> Arrival:
        # [Note: Which stream a gather runs on]
        # From device memory: the group's stream. From host memory to a GPU: an upload stream, behind the compute
        # stream's present work, which may have used the memory before. With several ranks the collective begins while
        # the upload stream is current, so it waits for the upload; the compute stream waits for neither until the
        # handle is waited for. Uploads read shards that the CPU writes at the next update, before which the host waits
        # for the device (ParameterValues.before_update).
        local, group = self.exchange.local, self._over or group
        if local.device == out.device:
            return group.all_gather(out, self.exchange)
        if group.size == 1 and self._uploads is not None:
            return SideCopy(local, out, self._uploads)
        if self._uploads is None:
            staged = self._staged(local.to(out.device))
            return _Keeping(group.all_gather(out, staged), staged)
        # Behind earlier users of both memories: a gathered array is free again once the compute stream has waited.
        with behind_current(out.device, self._uploads):
            staged = self._staged(sent_ahead(local, out.device))
            return _Keeping(group.all_gather(out, staged), staged)

    def _staged(self, shard: torch.Tensor) -> Buffer:
        staged = Buffer(shard)
        staged.bounds = self.exchange.bounds
        return staged

    def joined(self, group: Group) -> torch.Tensor | None:
        return (self._over or group).joined(self.exchange)


class _Keeping:
    """A handle that keeps the input of its operation alive."""

    def __init__(self, handle: Handle, source: object) -> None:
        self._handle, self._source = handle, source

    def wait(self) -> None:
        self._handle.wait()
        self._source = None


# [Note: Buffers of shards on a disk]
# All shards on one disk share a fixed number of equal buffers. Each kind of use has its own number of them, so that
# none waits for another: ``renewals`` are for the update thread, which writes new shards while the caller gathers. Two
# of the other buffers are never read ahead into: one is for the gather in use, one for a change. Buffers are equal,
# because otherwise a small shard could take the only large buffer that a large shard needs. With one rank a gather
# holds its buffer until the array is filled, oldest first (``gathers``). With several ranks the gather is over when it
# returns: each rank copies its shard into exchange memory that all chunks share, and that may be written again after
# the fence at its end.
@dataclass
class ReadAhead:
    """The buffers that the shards on one disk share, and their use.

    Attributes:
        buffer_bytes: the size of every buffer, so that a small shard does not take a large shard's buffer.
        buffers: number of buffers for gathers, reads ahead and changes, at least 1.
        renewals: number of further buffers for :meth:`DiskSource.renewing`, which another thread may call.
        count: number of buffers with a shard that was read ahead.
        gathers: gathers of a single rank that are under way, oldest first.
    """

    buffer_bytes: int
    buffers: int
    renewals: int = 0
    count: int = 0
    gathers: deque[_FromDisk] = field(default_factory=deque)


class DiskSource(ShardSource):
    """A shard on a disk; one of the store's buffers holds it while it is gathered or changed.

    Gathers read the committed version, so a new one may be written meanwhile.

    Args:
        store: the rank's store, with buffers of at least the shard's size.
        record: the shard's place in it.
        numel: elements of the shard.
        dtype: dtype of the shard.
        staging: exchange memory of at least ``numel`` elements, shared by all such chunks; ``None`` on one rank.
        ahead: the buffers that all such chunks share.
        over: see :class:`ShardSource`.
    """

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
        super().__init__(Tier.DISK, None, over)
        self.store, self.record, self._shared = store, record, ahead
        self._numel, self._dtype, self._staging = numel, dtype, staging
        self._nbytes = numel * dtype.itemsize
        self._ahead: tuple[torch.Tensor, Handle] | None = None
        self._written = False
        self.peers_take_part = staging is not None

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[: self._nbytes].view(self._dtype)

    def _read(self, newest: bool = False) -> tuple[torch.Tensor, Handle]:
        started, self._ahead = self._ahead, None
        if started is not None:
            self._shared.count -= 1
            return started
        buffer = self._buffer()
        if not self._written:  # the first values are about to be written
            buffer.zero_()
            return buffer, DONE
        try:
            return buffer, self.store.read(self.record, buffer, newest=newest, urgent=True)  # compute waits for it
        except BaseException:
            self.store.give(buffer)
            raise

    def _buffer(self) -> torch.Tensor:
        """Take a free buffer; finish gathers of other chunks that hold the last ones."""
        gathers = self._shared.gathers
        while gathers and (gathers[0].filled or len(gathers) + self._shared.count >= self._shared.buffers):
            gathers[0].fill()
            gathers.popleft()
        return self.store.buffer(self._shared.buffer_bytes)

    @contextmanager
    def opened(self, write: bool) -> Iterator[torch.Tensor]:
        # This uses a shard that was read ahead, so no old values remain after a write.
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
            buffer.zero_()  # also the padding
            yield self._view(buffer)
            self.store.write(self.record, buffer).wait()
            self._written = True
        finally:
            self.store.give(buffer)

    def prepare(self) -> None:
        if self._ahead is None and self._written and self._shared.count < self._shared.buffers - 2:
            self._ahead = self._read()
            self._shared.count += 1

    def forget(self) -> None:
        if self._ahead is not None:
            buffer, _ = self._read()
            self.store.give(buffer)

    def gather(self, group: Group, out: torch.Tensor) -> Arrival:
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
        # A rank that cannot read reports it to the others, which would wait for it. All shards are in place after this.
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


class _FromDisk:
    """A read from the disk into the gathered array of a single rank."""

    def __init__(
        self, store: DiskStore, buffer: torch.Tensor, reading: Handle, shard: torch.Tensor, out: torch.Tensor
    ) -> None:
        self._store, self._buffer, self._reading = store, buffer, reading
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = (out, shard)
        self._failure: DiskError | None = None

    @property
    def filled(self) -> bool:
        return self._copy is None

    def fill(self) -> None:
        """Finish the read and free the buffer; :meth:`wait` raises a failure."""
        if self._copy is not None:
            out, shard = self._copy
            try:
                self._reading.wait()
                out.copy_(shard)
            except DiskError as error:
                self._failure = error
            self._copy = None
            self._store.give(self._buffer)

    def wait(self) -> None:
        self.fill()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


# [Note: Secondary shards]
# Source: hpZ of ZeRO++ (arXiv 2306.10209), in which backward gathers parameters inside a node.
# Under ``secondary=k`` each ``k`` neighbors of a shard group keep a copy of the parameters together, in the dtype and
# the tier of the shards. The whole group makes the first gather of a chunk after an update. As soon as it has arrived,
# and before any parameter shows it (a module may write to its parameters), each rank copies its k-th part. From then on
# only the k ranks gather the chunk, in all passes, until shards are written (forget). The values are equal, and so are
# all results.
# * Which ranks have secondary shards depends on which gathers have begun, not on which have arrived: all ranks of the
#   shard group take part in all gathers, in one order (peers_take_part), so they have begun the same ones. After a
#   failed pass, and if ranks that agree on gathers find a difference (GatherAgreement.agree), all of them drop all
#   secondary shards and gather as a whole group again.
# * A gather of secondary shards first waits for the gather that fills this rank's. If memory is mapped, a rank cannot
#   see that the peers have theirs: then all k ranks synchronize before they read. They read at once, and the memory is
#   written again only after a later agreement, which every rank reaches after its read.
# * Values that are communicated in 8 bits are rounded when they arrive (see [Note: Rounded parameters]). A k-th of a
#   chunk consists of entire shards, so the k ranks communicate it in 8 bits, too, in the blocks that were rounded
#   together.
class SecondarySource(MemorySource):
    """A shard in memory with a secondary shard; see [Note: Secondary shards].

    Args:
        own: the home of this rank's shard.
        secondary: the home of its secondary shard, ``numel / k`` elements of a chunk.
        among: the ``k`` ranks that have the other parts of the copy.
    """

    peers_take_part = True

    def __init__(self, own: MemorySource, secondary: MemorySource, among: Group) -> None:
        super().__init__(own.exchange, own.tier, own._uploads, own._over)
        self.secondary, self._among = secondary, among
        self.begun = False
        """Whether a gather has begun, or ended, that fills the secondary shard."""
        self._arriving: _Arriving | None = None

    def forget(self) -> None:
        """Make the whole group do the next gather, since the shards have other values."""
        self.begun, self._arriving = False, None

    def gather(self, group: Group, out: torch.Tensor) -> Arrival:
        if not self.begun:
            self._arriving = arriving = _Arriving(self, super().gather(group, out), out)
            self.begun = True
            return arriving
        if self._arriving is not None:
            self._arriving.wait()
        if self._among.one_sided_gather:
            self._among.fence()
        return self.secondary.gather(self._among, out)

    def keep(self, arriving: _Arriving, full: torch.Tensor) -> None:
        """Copy this rank's part of ``full``, which has arrived, unless the shards have changed since."""
        if self._arriving is arriving:
            self.secondary.exchange.local.copy_(self._among.slice_of(full, self._among.rank))
            self._arriving = None

    def joined(self, group: Group) -> torch.Tensor | None:
        return None


class _Arriving:
    """A gather by the whole group, of which this rank keeps its part."""

    def __init__(self, source: SecondarySource, handle: Arrival, full: torch.Tensor) -> None:
        self._source, self._handle = source, handle
        self._full: torch.Tensor | None = full

    def wait(self) -> None:
        if self._full is None:
            return
        try:
            self._handle.wait()
        except Exception:
            self._full = None
            self._source.forget()
            raise
        self._source.keep(self, self._full)
        self._full = None  # its owner may have another use for it
