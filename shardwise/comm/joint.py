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
        self._nbytes = sum(peer.nbytes for peer in peers)

    def whole(self) -> Tensor:
        """The array, in a storage of its own; see [Note: A storage that moves]. What this rank has written to it before
        is dropped."""
        if self._private is None:
            raise RuntimeError(f"{self!r} of group {self.group.name!r} was released: its group is closed")
        page = mmap.PAGESIZE
        if self._nbytes:
            self._private.madvise(mmap.MADV_DONTNEED, self._start, -(-self._nbytes // page) * page)
        return tensor_in(self._private, self._start, sum(peer.numel() for peer in self.peers), self.local.dtype)

    def release(self) -> None:
        """Drop the memory; it is unmapped when nobody else holds a tensor of it."""
        self.local = torch.empty(0, dtype=self.local.dtype, device="cpu")
        self.peers, self._private = (), None
        self._whole = (self.local, ())


def tensor_in(segment: mmap.mmap, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """``numel`` elements of a mapping, from byte ``offset`` on."""
    if not numel:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(segment, dtype=dtype, count=numel, offset=offset)
