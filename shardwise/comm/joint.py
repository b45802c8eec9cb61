"""Shards that lie in one array, which all ranks map."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from shardwise.comm import pages
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
        self._address = tensor_in(private, start, self._nbytes, torch.uint8).data_ptr()
        self._tells: bool | None = None

    def whole(self) -> Tensor:
        """The array, in a storage of its own; see [Note: A storage that moves]."""
        if self._private is None:
            raise RuntimeError(f"{self!r} of group {self.group.name!r} was released: its group is closed")
        return tensor_in(self._private, self._start, sum(peer.numel() for peer in self.peers), self.local.dtype)

    def written(self) -> bool | None:
        """See :meth:`Buffer.written`."""
        if self._private is None:
            return None
        if self._tells is None:
            self._tells = self._try()
        return pages.written(self._address, self._nbytes) if self._tells else None

    def _try(self) -> bool:
        """Whether the system tells of a page that is written to here, and of the same one when that is dropped."""
        if self._private is None or not self._nbytes:
            return False
        self._private[self._start] = self._private[self._start]
        told = pages.written(self._address, self._nbytes)
        self._drop()
        self._private[self._start]  # the page is there again
        return told is True and pages.written(self._address, self._nbytes) is False

    def drop_private(self) -> None:
        """Forget what this rank has written to the array."""
        if self._nbytes and self.written() is not False:
            self._drop()

    def _drop(self) -> None:
        if self._private is not None:
            page = mmap.PAGESIZE
            self._private.madvise(mmap.MADV_DONTNEED, self._start, -(-self._nbytes // page) * page)

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
