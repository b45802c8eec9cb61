"""A second shard of a chunk, larger than its own: a part of what a gather brought, kept for the gathers that follow.

Source: hpZ of ZeRO++ (arXiv 2306.10209), in which backward gathers parameters inside a node.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.core.comm import Buffer, Group, Handle
from shardwise.core.shards.source import MemorySource, ShardSource

__all__ = ["SecondaryShards", "SecondarySource"]


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
