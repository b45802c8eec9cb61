"""Shards that lie in one array, which all ranks map."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from shardwise.comm.group import Buffer, Group

__all__ = ["JointBuffer", "tensor_in"]


class JointBuffer(Buffer):
    """A shard in one array that all ranks map.

    Args:
        group: its group.
        peers: every rank's part of the array.
        private: where it is mapped privately: shows what is shared wherever this rank has written nothing.
        start: in ``private``, bytes, a multiple of the page size.
    """

    def __init__(self, group: Group, peers: list[Tensor], private: mmap.mmap, start: int) -> None:
        super().__init__(peers[group.rank], tuple(peers))
        self.group = group
        self._private: mmap.mmap | None = private
        self._start = start

    def whole(self) -> Tensor:
        """The array, in a storage of its own: torch may exchange a storage's memory (``share_memory_``)."""
        if self._private is None:
            raise RuntimeError(f"{self!r} of group {self.group.name!r} was released: its group is closed")
        return tensor_in(self._private, self._start, sum(peer.numel() for peer in self.peers), self.local.dtype)

    def drop_private(self) -> None:
        """Forget what this rank has written to the array."""
        nbytes = sum(peer.nbytes for peer in self.peers)
        if self._private is not None and nbytes:
            page = mmap.PAGESIZE
            self._private.madvise(mmap.MADV_DONTNEED, self._start, -(-nbytes // page) * page)

    def release(self) -> None:
        """Drop the memory; it is unmapped when nobody else holds a tensor of it."""
        self.local = torch.empty(0, dtype=self.local.dtype)
        self.peers, self._private = (), None
        self._whole = (self.local, ())


def tensor_in(segment: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """``numel`` elements of a mapping, from byte ``offset`` on."""
    if not numel:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(segment, dtype=dtype, count=numel, offset=offset)
