"""Buffers that all ranks of a host map, and the ranks' counters for them."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.core.comm.errors import PeerError
from shardwise.core.comm.group import Buffer, Group, Handle
from shardwise.core.comm.mapped_memory import LINE_WORDS

if TYPE_CHECKING:
    from shardwise.core.comm.shared import SharedGroup

# A buffer's cache line, in words of 8 bytes: sequence numbers of the last operation that this rank published (its data
# may be read), reduced (its own slice is summed in place) and consumed (it no longer reads the peers' data).
PUBLISHED, KIND, NUMEL, REDUCED, CONSUMED = range(5)
SHOWN = (PUBLISHED, REDUCED)
"""Counters after which peers may read the written data."""
REDUCE_SCATTER, ALL_REDUCE = range(2)
REDUCTIONS = ("reduce_scatter", "all_reduce")


# [Note: A storage that moves]
# The program's parameters are views of ``local``, and torch may exchange the memory of a storage under all its tensors:
# ``share_memory_()`` does, and so does sending a parameter to another process of torch.multiprocessing. Peers map the
# previous memory. ``peers[rank]`` therefore has a separate storage, which is internal and stays where it was mapped.
# ``local`` then refers to the parameter, which processes that share it may change; it is copied to the mapped memory
# whenever peers are allowed to read it: with a counter, or at a fence.
class SharedBuffer(Buffer):
    """A buffer that all ranks map.

    Args:
        local: this rank's memory, in a separate storage.

    Attributes:
        name: name for messages.
        sequence: number of the last operation published by this rank.
    """

    def __init__(
        self, group: SharedGroup, name: str, line: int, segments: list[memoryview], peers: list[Tensor], local: Tensor
    ) -> None:
        super().__init__(local, tuple(peers))
        self.group = group
        self.name = name
        self._mapped_at = local.data_ptr()
        self.sequence = 0
        self.unfinished: Handle | None = None
        self._base = line * LINE_WORDS
        self._segments = segments

    def writable(self) -> bool:
        """Return True if this rank's part is finished and no peer reads the last published data."""
        return self.unfinished is None and not self.behind(CONSUMED, self.sequence)

    def wait_writable(self) -> None:
        """Block until no peer reads the last published data. This rank's part is finished first."""
        if self.unfinished is not None:
            self.unfinished.wait()
        sequence = self.sequence
        if self.behind(CONSUMED, sequence):
            self.group.wait_until(
                lambda: self.behind(CONSUMED, sequence), f"wait_writable of {self.name}, sequence {sequence}"
            )

    def behind(self, cell: int, sequence: int) -> list[int]:
        """Return the ranks whose counter has not reached ``sequence``."""
        return [rank for rank, words in enumerate(self._segments) if words[self._base + cell] < sequence]

    def publish(self, kind: int) -> None:
        """Publish the buffer to the peers for a reduction of this ``kind``.

        Raises:
            RuntimeError: some ranks still read the data published before.
        """
        readers = self.behind(CONSUMED, self.sequence)
        if readers:
            raise RuntimeError(
                f"{self.name} is being reduced again while ranks {readers} still read sequence {self.sequence}; "
                "call wait_writable() before writing to it"
            )
        self.sequence += 1
        self.tell(KIND, kind)
        self.tell(NUMEL, self.local.numel())
        self.tell(PUBLISHED, self.sequence)

    def check_published(self, what: str) -> None:
        """Check that all ranks have published the same operation.

        Raises:
            PeerError: they have not; this rank is marked as failed for its peers.
        """
        published = self.published()
        if any(other != published[0] for other in published):
            self.group.fail()
            operations = (f"rank {rank}: {REDUCTIONS[kind]} of {numel}" for rank, (kind, numel) in enumerate(published))
            raise PeerError(
                f"{what} in group {self.group.name!r}: ranks run different operations on this buffer "
                f"({', '.join(operations)} elements); all ranks must start the same operations in the same order"
            )

    def published(self) -> list[tuple[int, int]]:
        """Return the kind and the number of elements of the last operation that each rank published."""
        return [(words[self._base + KIND], words[self._base + NUMEL]) for words in self._segments]

    def tell(self, cell: int, value: int) -> None:
        """Set a counter of this rank; a rank that sees the new value also sees everything written before."""
        if cell in SHOWN:
            self.show()
        self._segments[self.group.rank][self._base + cell] = value

    def show(self) -> None:
        """Copy ``local`` to the mapped memory if it has moved; see [Note: A storage that moves]."""
        if self.local.data_ptr() != self._mapped_at and self.peers:
            self.peers[self.group.rank].copy_(self.local)

    def release(self) -> None:
        """Drop the memory; it is unmapped when no other tensor refers to it."""
        self.local = torch.empty(0, dtype=self.local.dtype, device="cpu")
        self.peers = ()
        self._full = (self.local, ())
        self._segments = []


class MappedBuffer(Buffer):
    """A shard in one array that all ranks map.

    Args:
        group: the group of the ranks that map the buffer.
        peers: every rank's part of the array.
        private: the private mapping, which shows the shared contents where this rank has written nothing.
        start: offset in ``private`` in bytes, a multiple of the page size.
    """

    def __init__(self, group: Group, peers: list[Tensor], private: mmap.mmap, start: int) -> None:
        super().__init__(peers[group.rank], tuple(peers))
        self.group = group
        self._private: mmap.mmap | None = private
        self._start = start
        self._nbytes = sum(peer.nbytes for peer in peers)

    def full_view(self) -> Tensor:
        """Return the array in a separate storage; see [Note: A storage that moves]. Previous writes of this rank to it
        are discarded."""
        if self._private is None:
            raise RuntimeError(f"{self!r} of group {self.group.name!r} was released: its group is closed")
        page = mmap.PAGESIZE
        if self._nbytes:
            self._private.madvise(mmap.MADV_DONTNEED, self._start, -(-self._nbytes // page) * page)
        return tensor_in(self._private, self._start, sum(peer.numel() for peer in self.peers), self.local.dtype)

    def release(self) -> None:
        """Drop the memory; it is unmapped when no other tensor refers to it."""
        self.local = torch.empty(0, dtype=self.local.dtype, device="cpu")
        self.peers, self._private = (), None
        self._full = (self.local, ())


def tensor_in(segment: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return ``numel`` elements of a mapping, starting at byte ``offset``."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(segment, dtype=dtype, count=numel, offset=offset)
